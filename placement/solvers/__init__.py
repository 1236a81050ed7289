"""HiGHS for mixed-integer programs, and the compiler for loops of placers."""
