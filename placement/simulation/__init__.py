"""The discrete-event simulator that predicts a step, with shared links."""
