"""The compiler that turns inner loops of placers from Python into machine code."""
