"""Parts that placers are built of: coarsening, device groups, evaluation, exact models."""
