"""CSR products, scatters of rows and prefix sums."""
