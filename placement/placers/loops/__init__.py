"""The placers' inner loops, which run as plain Python or as machine code."""
