"""Memory of programs: arena planning, layouts, backends and what a step uses."""
