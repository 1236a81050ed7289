"""Public path of the batching rules, for ops that users declare (see docs/models/extending.md)."""

from graphflow.ops.base.batching_rules import *  # noqa: F403
from graphflow.ops.base.batching_rules import (
    leading_size,
    merge_batches,
    merge_first_batch,
    trailing_axis,
)

# Names of these rules in earlier releases.
flattened, leading, merged, trailing = merge_batches, leading_size, merge_first_batch, trailing_axis
