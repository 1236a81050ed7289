"""Rules for splitting ops over devices: the public path of the sharding rules.

docs/models/extending.md shows how ops of users name them. Rules have the names of their ops. The
names that they had before stay importable from here.
"""

from graphflow.ops.sharding import rules
from graphflow.ops.sharding.reshapes import reshape_rule
from graphflow.ops.sharding.rules import *  # noqa: F403

Cut = rules.ShardView
aligned = rules.broadcast_letters
alike = rules.view_rule
averaged = rules.mean_rule
broadcast = rules.broadcast_rule
combined = rules.reduction_rule
counted = rules.arange_rule
created = rules.creation_rule
diagonal = rules.triangle_rule
drawn = rules.random_rule
elementwise = rules.elementwise_rule
expanded = rules.expand_dims_rule
eye = rules.eye_rule
first_axes = rules.leading_axes_rule
fixed = rules.equation_rule
joint = rules.linear_rule
matrices = rules.matrix_rule
multiplied = rules.prod_rule
permuted = rules.permute_rule
product_rule = rules.matmul_rule
reduced = rules.sum_rule
reshaped = reshape_rule
rows = rules.row_rule
squeezed = rules.squeeze_rule
turned = rules.rotate_rule
