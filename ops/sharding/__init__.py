"""How ops may be cut over devices: the public path of the sharding rules (docs/extending.md)."""

from graphflow.ops.sharding.rules import *  # noqa: F403
