"""Tables whose rows several places own: lookups and updates that move distinct rows only."""
