"""From a graph and a cluster to a placement problem: times, memory and constraints."""
