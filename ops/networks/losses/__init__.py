"""Losses of predictions: of numbers, of classes, of likelihoods, of sequences; and distances."""
