"""The public path of the batching rules that ops of users' own name (docs/extending.md)."""

from graphflow.ops.base.batching_rules import *  # noqa: F403
