"""Declarations of ops: everything about one op in one block, its help, and the registry."""
