"""Ops between devices: send, receive and the collectives."""
