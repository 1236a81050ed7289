"""Tables of rows that ids choose: sums over bags of rows, and tables of any ids."""
