"""Recurrent networks: cells, and whole sequences of LSTMs as one op."""
