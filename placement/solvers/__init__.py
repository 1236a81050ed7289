"""Mixed-integer programs for HiGHS."""
