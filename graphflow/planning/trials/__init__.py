"""Steps that only measure: profile fetches before their first plan, and the overhead of a step."""
