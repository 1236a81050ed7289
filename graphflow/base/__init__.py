"""Small foundations that know nothing of graphs: argument checks, formatting, progress, source
lines."""
