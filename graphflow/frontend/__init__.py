"""How users write graphs: placeholders and variables, traced functions, control flow, feeds."""
