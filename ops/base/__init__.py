"""Shared by op families: shape and batching rules, composites of ops, and ops on variables."""
