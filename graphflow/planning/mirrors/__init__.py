"""Mirrors of variables: copies in other processes that take over when a worker is lost."""
