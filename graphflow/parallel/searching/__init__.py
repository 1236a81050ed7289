"""The search for the best strategy: candidates, cost bounds, measurements."""
