"""Layers, losses, normalisation, dropout and recurrent networks."""
