"""From fetches to steps: connect to a cluster, compile, run; hold the values of variables."""
