"""Nodes and tensors: how calls of ops build them, and the scopes in which they are built."""
