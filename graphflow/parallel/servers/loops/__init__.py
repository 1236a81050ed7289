"""The loops of servers and workers, and what they send each other."""
