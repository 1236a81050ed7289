"""Methods that train some coordinates of a linear model at a time."""
