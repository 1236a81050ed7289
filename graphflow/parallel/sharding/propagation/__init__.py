"""Layouts of all tensors from those of a few: of a user's rules, of the batch, of replicas."""
