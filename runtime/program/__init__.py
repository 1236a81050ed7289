"""Partitions compiled to straight-line Python over planned buffers."""
