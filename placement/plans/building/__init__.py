"""Build plans: place a problem, compare with baselines, fit it in memory, tell it as a Plan."""
