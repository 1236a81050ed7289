"""The ways to write graphs: placeholders and variables, traced functions, control flow, feeds."""
