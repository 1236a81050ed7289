"""Training that talks seldom: replicas with values of their own, exchanged now and then."""
