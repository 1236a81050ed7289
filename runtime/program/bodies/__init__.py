"""Bodies of loops, branches, calls and parties as they run inside a program."""
