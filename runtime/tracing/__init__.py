"""Traces of steps: events on one clock, tables of what travelled, and the file for Perfetto."""
