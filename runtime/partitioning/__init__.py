"""A placed graph cut into one partition for each device."""
