"""Layers: objects that hold variables and are called on tensors (`gf.nn`)."""
