"""Tables in files: rows as text or arrays, read in parts and never whole."""
