"""The op families. Importing this package fills the registry."""

from graphflow.ops import elementwise, state

__all__ = ["elementwise", "state"]
