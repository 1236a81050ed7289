"""Recurrent networks: cells, their runs along sequences, and LSTM and GRU as ops."""
