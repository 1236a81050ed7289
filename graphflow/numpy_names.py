"""numpy's functions beside tensors, and what tensors have elsewhere: which op each stands for, and
what is said where it is asked for.

numpy's arrays leave their operators to tensors (`array + x`), through the ufuncs behind them. All
else that numpy is asked to do with a tensor is refused on the user's line, with what there is
instead: a part of numpy that worked would only hide where the rest begins.
"""

from __future__ import annotations

from typing import Any

from graphflow.location import user_location
from graphflow.registry import FUNCTIONS

OPERATORS = {
    "add": "add", "subtract": "subtract", "multiply": "multiply", "divide": "divide",
    "floor_divide": "floor_divide", "remainder": "remainder", "power": "pow", "matmul": "matmul",
    "less": "less", "less_equal": "less_equal", "greater": "greater",
    "greater_equal": "greater_equal", "equal": "equal", "not_equal": "not_equal",
    "bitwise_and": "bitwise_and", "bitwise_or": "bitwise_or", "bitwise_xor": "bitwise_xor",
    "left_shift": "bitwise_left_shift", "right_shift": "bitwise_right_shift",
}  # fmt: skip
"""The ufuncs behind Python's operators, and our names of them."""

RENAMED = {
    **OPERATORS,
    "absolute": "abs", "amax": "max", "amin": "min", "arccos": "acos", "arccosh": "acosh",
    "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan", "arctan2": "atan2",
    "arctanh": "atanh", "concatenate": "concat", "conjugate": "conj", "cross": "linalg.cross",
    "dot": "matmul", "invert": "bitwise_invert", "mod": "remainder", "resize": "",
    "rint": "round", "transpose": "permute_dims", "true_divide": "divide",
    "unique": "unique_all",
}  # fmt: skip
"""What the array API, and so graphflow, calls otherwise than older numpy; "": it has no such op."""

ATTRIBUTES = ("shape", "ndim", "size", "real", "imag")
"""Functions of numpy that only ask for an attribute."""

_METHODS = (
    "abs argsort clip cumsum diagonal exp expand_dims flip floor gather log logsumexp matmul "
    "nonzero pow repeat roll round searchsorted sign sin cos sort split sqrt square swapaxes take "
    "tanh tile trace nn.dropout nn.gelu nn.log_softmax nn.relu nn.sigmoid nn.softmax "
    "linalg.cholesky linalg.det linalg.inv linalg.norm"
)
ELSEWHERE = {
    **{name.rpartition(".")[2]: f"gf.{name}(x, …)" for name in _METHODS.split()},
    **dict.fromkeys(("numpy", "item", "tolist", "eval", "value"), "Session.run, for values"),
    **dict.fromkeys(("backward", "grad", "requires_grad"), "gf.gradients(loss, variables)"),
    **dict.fromkeys(("cuda", "cpu"), "gf.device(name), around what builds nodes"),
    **dict.fromkeys(("clone", "copy"), "the tensor itself, which never changes"),
    **dict.fromkeys(("assign", "assign_add", "data"), "gf.assign(variable, value)"),
    **dict.fromkeys(("bool", "double", "float", "half", "int", "long", "to"), ".astype(dtype)"),
    **dict.fromkeys(("dot", "mm", "bmm"), "gf.matmul(x, …)"), "at": "gf.scatter or gf.index_add",
    **dict.fromkeys(("permute", "transpose"), "gf.permute_dims(x, axes)"), "t": ".T",
    "detach": "gf.stop_gradient(x)", "view": ".reshape(shape)", "flatten": ".reshape(-1)",
    "ravel": ".reshape(-1)", "unsqueeze": "gf.expand_dims(x, axis)", "clamp": "gf.clip(x, …)",
    "expand": "gf.broadcast_to(x, shape)", "masked_fill": "gf.where(mask, value, x)",
    "dim": ".ndim", "numel": ".size", "get_shape": ".shape",
}  # fmt: skip
"""What stands for attributes that the arrays of numpy, torch, JAX and TensorFlow have."""


def refusal(function: Any, what: str) -> str:
    """What is said of a function of numpy that was given a tensor, `what`."""
    name = RENAMED.get(function.__name__, function.__name__)
    part = str(getattr(function, "__module__", "")).removeprefix("numpy.")
    room = f"{part}." if part in ("linalg", "fft") else ""
    op = f"gf.{room}{name}, or " if name.rpartition(".")[2] in FUNCTIONS else ""
    return (
        f"np.{room}{function.__name__} at {user_location()}: {what} is symbolic while the graph is "
        f"built; use {op}Session.run for values"
    )
