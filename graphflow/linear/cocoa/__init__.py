"""CoCoA: linear models whose data lies in parts on several workers."""
