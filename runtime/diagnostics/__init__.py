"""After a crash: the flight recorder and the detection of out-of-memory kills."""
