"""Closed-form estimates of training runs on hardware that is not at hand."""
