"""The functions of numpy that tensors support, and numpy's older names of ops.

In `array + x`, numpy passes the operator on to the tensor by the ufunc behind it. Every other
function of numpy raises an error that names the op to use instead. Supporting some of them would
hide where the support ends.
"""

from __future__ import annotations

OPERATORS = {
    "add": "add", "subtract": "subtract", "multiply": "multiply", "divide": "divide",
    "floor_divide": "floor_divide", "remainder": "remainder", "power": "pow", "matmul": "matmul",
    "less": "less", "less_equal": "less_equal", "greater": "greater",
    "greater_equal": "greater_equal", "equal": "equal", "not_equal": "not_equal",
    "bitwise_and": "bitwise_and", "bitwise_or": "bitwise_or", "bitwise_xor": "bitwise_xor",
    "left_shift": "bitwise_left_shift", "right_shift": "bitwise_right_shift",
}  # fmt: skip
"""The ufuncs behind Python's operators, and the ops that they stand for."""

ARRAY_API_NAMES = {
    **OPERATORS,
    "absolute": "abs", "amax": "max", "amin": "min", "arccos": "acos", "arccosh": "acosh",
    "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan", "arctan2": "atan2",
    "arctanh": "atanh", "concatenate": "concat", "conjugate": "conj", "cross": "linalg.cross",
    "dot": "matmul", "invert": "bitwise_invert", "mod": "remainder", "resize": "",
    "rint": "round", "transpose": "permute_dims", "true_divide": "divide",
    "unique": "unique_all",
}  # fmt: skip
"""Names of the array API, which graphflow follows, by older names of numpy; "" if there is none."""

ATTRIBUTES = ("shape", "ndim", "size", "real", "imag")
"""Functions of numpy that only read an attribute."""
