"""How fast the hardware is: measured, kept on disk, corrected by traces."""
