"""The compiler that turns inner loops from Python into machine code."""
