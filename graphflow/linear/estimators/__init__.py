"""The estimators of `gf.linear`, with scikit-learn's interface."""
