"""Hints for names of other libraries, and for modules that are called like functions.

The errors that name a replacement are raised by tensors, sessions and modules.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

from graphflow.base.argument_checks import did_you_mean
from graphflow.base.source_location import user_location
from graphflow.errors import ArgumentError
from graphflow.ir.declarations.registry import FUNCTIONS
from graphflow.ir.dtypes import DTYPES
from graphflow.ir.numpy_interop import ARRAY_API_NAMES

_METHODS = (
    "abs argsort clip cumsum diagonal exp expand_dims flip floor gather log logsumexp matmul "
    "nonzero pow repeat roll round searchsorted sign sin cos sort split sqrt square swapaxes take "
    "tanh tile trace nn.dropout nn.gelu nn.log_softmax nn.relu nn.sigmoid nn.softmax "
    "linalg.cholesky linalg.det linalg.inv linalg.norm"
)
_DEVICE_HINT = 'a block `with gf.device("/worker:0/gpu:0"):` around the lines that build nodes'
ATTRIBUTE_HINTS = {
    **{name.rpartition(".")[2]: f"gf.{name}(x, …)" for name in _METHODS.split()},
    **dict.fromkeys(
        ("numpy", "item", "tolist", "eval", "value"),
        "Session.run, for values: session.run(x, feeds)",
    ),
    "backward": "train = gf.optim.Adam(rate).minimize(loss), or gf.gradients(loss, variables)",
    **dict.fromkeys(("grad", "requires_grad"), "gf.gradients(loss, variables)"),
    **dict.fromkeys(
        ("grad_fn", "is_leaf", "requires_grad_", "retain_grad", "zero_grad"),
        "gf.gradients(loss, variables)",
    ),
    **dict.fromkeys(("cuda", "cpu", "is_cuda"), _DEVICE_HINT),
    **dict.fromkeys(("block_until_ready", "compute", "result"), "Session.run, for values"),
    "to": f"for a place {_DEVICE_HINT} (a session also takes GPUs by itself); for another dtype "
    ".astype(dtype)",
    "type": ".dtype, or .astype(dtype)",
    **dict.fromkeys(("clone", "contiguous", "copy"), "the tensor itself, which never changes"),
    **dict.fromkeys(("assign", "assign_add", "data"), "gf.assign(variable, value)"),
    **dict.fromkeys(("bool", "double", "float", "half", "int", "long"), ".astype(dtype)"),
    **dict.fromkeys(("dot", "mm", "bmm"), "gf.matmul(x, …)"), "at": "gf.scatter or gf.index_add",
    **dict.fromkeys(("permute", "transpose"), "gf.permute_dims(x, axes)"), "t": ".T",
    "detach": "gf.stop_gradient(x)", "view": ".reshape(shape)", "flatten": ".reshape(-1)",
    "ravel": ".reshape(-1)", "unsqueeze": "gf.expand_dims(x, axis)", "clamp": "gf.clip(x, …)",
    "expand": "gf.broadcast_to(x, shape)", "masked_fill": "gf.masked_fill(x, mask, value)",
    "dim": ".ndim", "ndimension": ".ndim", "numel": ".size", "nelement": ".size",
    "get_shape": ".shape", **dict.fromkeys(("view_as", "reshape_as"), ".reshape(y.shape)"),
    "expand_as": "gf.broadcast_to(x, y.shape)", "type_as": ".astype(y.dtype)",
    "mul": "x * y", "div": "x / y", "sub": "x - y", "neg": "-x", "eq": "x == y", "ne": "x != y",
    "lt": "x < y", "le": "x <= y", "gt": "x > y", "ge": "x >= y", "topk": "gf.top_k(x, k)",
    "index_select": "gf.take(x, indices, axis)", "masked_select": "gf.compress(condition, x, size)",
    "chunk": "gf.split(x, parts)", "unbind": "gf.unstack(x, axis)", "narrow": "x[start:stop]",
    "repeat_interleave": "gf.repeat(x, n)", "inverse": "gf.linalg.inv(x)",
    "is_contiguous": "nothing in its place: tensors are contiguous",
}  # fmt: skip
"""Replacements for attributes of arrays in numpy, torch, JAX and TensorFlow."""

_LOSSES = {
    "BCELoss": "binary_cross_entropy", "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "CrossEntropyLoss": "cross_entropy", "HuberLoss": "huber_loss", "L1Loss": "l1_loss",
    "MSELoss": "mse_loss", "NLLLoss": "nll_loss", "SmoothL1Loss": "smooth_l1_loss",
    "CosineEmbeddingLoss": "cosine_embedding_loss", "GaussianNLLLoss": "gaussian_nll_loss",
    "PoissonNLLLoss": "poisson_nll_loss", "CTCLoss": "ctc_loss", "sigmoid_focal_loss": "focal_loss",
    "KLDivLoss": "kl_div", "HingeEmbeddingLoss": "hinge_embedding_loss",
    "MarginRankingLoss": "margin_ranking_loss", "TripletMarginLoss": "triplet_margin_loss",
}  # fmt: skip
_LAYERS = {
    "Dense": "Linear", "Module": "Layer", "BatchNormalization": "BatchNorm",
    "LayerNormalization": "LayerNorm", "MultiheadAttention": "MultiHeadAttention",
    **{f"Conv{d}D": f"Conv{d}d" for d in "123"},
    **{f"Conv{d}DTranspose": f"ConvTranspose{d}d" for d in "123"},
    **{f"MaxPool{end}{d}D": f"MaxPool{d}d" for d in "123" for end in ("", "ing")},
    **{f"AveragePooling{d}D": f"AvgPool{d}d" for d in "123"},
    **{f"Global{kind}Pooling{d}D": f"global_{ours}_pool" for d in "123"
       for kind, ours in (("Average", "avg"), ("Max", "max"))},
    "Fold": "fold", "Unfold": "unfold", "PixelShuffle": "pixel_shuffle",
    "PixelUnshuffle": "pixel_unshuffle", "LocalResponseNorm": "local_response_norm",
    "CosineSimilarity": "cosine_similarity", "LogSigmoid": "log_sigmoid", "Softsign": "softsign",
    "Hardsigmoid": "hard_sigmoid", "Hardtanh": "hard_tanh", "Hardshrink": "hard_shrink",
    "Softshrink": "soft_shrink", "CELU": "celu",
    **{f"Adaptive{kind}Pool{d}d": f"Adaptive{kind}Pool" for kind in ("Avg", "Max") for d in "123"},
    **{f"InstanceNorm{d}d": "InstanceNorm" for d in "123"},
}  # fmt: skip
FUNCTION_HINTS = {
    **{name: f"gf.{ours}" for name, ours in ARRAY_API_NAMES.items() if ours not in ("", name)},
    **{name: f"gf.nn.{ours}" for name, ours in (_LOSSES | _LAYERS).items()},
    **{f"reduce_{name}": f"gf.{name}" for name in ("all", "any", "max", "mean", "min", "sum")},
    **dict.fromkeys(("GradientTape", "grad", "value_and_grad"), "gf.gradients(loss, variables)"),
    **dict.fromkeys(("array", "as_tensor", "asarray", "convert_to_tensor"), "gf.constant"),
    **dict.fromkeys(("DataParallel", "DistributedDataParallel"), "gf.parallel.Data"),
    **dict.fromkeys(("Parameter", "Variable"), "gf.variable"),
    **dict.fromkeys(("jacfwd", "jacrev"), "gf.jacobian"),
    "chunk": "gf.split(x, parts)",
    "set_default_dtype": "dtype=, of each layer and initial value",
    **dict.fromkeys(("compile", "jit"), "gf.Session, which compiles what it runs"),
    **dict.fromkeys(("run", "eval"), "a session's: gf.Session().run(fetches, feeds)"),
    **dict.fromkeys(("cuda", "device_put", "to"), "gf.device(name), around what builds nodes"),
    "train": "gf.optim.Adam(rate).minimize(loss), run by a session, or gf.fit",
    **dict.fromkeys(("keras", "layers"), "gf.nn"),
    "Function": "gf.custom_vjp", "Placeholder": "gf.placeholder", "Constant": "gf.constant",
    "cat": "gf.concat", "hstack": "gf.concat(matrices, 1), or gf.concat(vectors)",
    "vstack": "gf.concat(matrices), or gf.stack(vectors)",
    **dict.fromkeys(("mm", "bmm"), "gf.matmul"),
    "stop_grad": "gf.stop_gradient(x)",
    **dict.fromkeys(
        ("enable_grad", "inference_mode", "no_grad", "set_grad_enabled"),
        "not needed: only gf.gradients differentiates, and gf.stop_gradient(x) holds x fixed",
    ),
    **dict.fromkeys(("manual_seed", "set_seed"), "gf.random.seed"),
    **dict.fromkeys(
        ("save", "load"),
        "a session's, for all state: s.save(folder), s.load(folder); or a model's, for weights: "
        "model.save(s, path), model.load(s, path)",
    ),
    **dict.fromkeys(
        ("DataLoader", "Dataset", "TensorDataset", "from_tensor_slices"),
        "gf.data.arrays(x=…, y=…).shuffle(seed).batch(n)",
    ),
    "utils": "gf.data.arrays(x=…, y=…).shuffle(seed).batch(n) for batches, and "
    "gf.optim.clip_by_global_norm for gradients",
    "Model": "gf.nn.Layer, or gf.nn.Sequential(layer, layer, …)",
    "Input": "gf.placeholder(dtype, (None, …)), with None for any number of rows",
    "losses": "gf.nn: gf.nn.cross_entropy, gf.nn.mse_loss …",
    "Activation": "a layer such as gf.nn.ReLU(), or a function such as gf.nn.relu",
    **dict.fromkeys(("ParameterList", "ParameterDict"), "a list or a dict of gf.variable(…)"),
    **{f"{kind}Pad{d}d": "gf.pad(x, widths, mode)" for d in "123"
       for kind in ("Constant", "Reflection", "Replication", "Zero")},
    "igamma": "gf.gammainc", "igammac": "gf.gammaincc",
    **dict.fromkeys(
        ("PRNGKey", "key", "fold_in"),
        "not needed: gf.random.seed(n) fixes all draws, and each op draws its own numbers",
    ),
    **dict.fromkeys(
        ("distributed", "pmap", "shard_map", "sharding"),
        "minimize(loss, strategy=gf.parallel.Data(n)) in a session on a gf.Cluster",
    ),
    **dict.fromkeys(
        ("tree_map", "tree_util", "tree"), "a dict: model.parameters() has variables by name"
    ),
    **dict.fromkeys(("optax", "optimizers"), "gf.optim"),
    **dict.fromkeys(("lr_scheduler", "cosine_decay_schedule"), "gf.optim.schedules"),
    **dict.fromkeys(
        ("jax", "jnp", "lax", "math", "numpy"), "gf itself: gf.exp, gf.scan, gf.cond …"
    ),
    "callbacks": "gf.training", "ModelCheckpoint": "gf.fit(…, checkpoint=folder)",
    "chain": "minimize(loss, transform=…), such as gf.optim.clip_by_global_norm",
    "ModuleDict": "a dict", "summary": "a model's: model.summary((None, 784))",
    "xavier_uniform_": "gf.init.glorot", "kaiming_normal_": "gf.init.he",
    **{name: f'the word "{name}"' for name in DTYPES if name not in ("bool", "complex")},
    "ModuleList": "a list", "cast": "gf.astype", "clamp": "gf.clip",
    "expm": "gf.linalg.matrix_exp", "lu_factor": "gf.linalg.lu(x)",
    "lu_solve": "gf.linalg.solve(a, b), which factors a once for all columns of b",
    "custom_gradient": "gf.custom_vjp", "cumulative_sum": "gf.cumsum", "empty": "gf.zeros",
    "empty_like": "gf.zeros_like", "flatten": "x.reshape(-1)", "fill": "gf.full",
    "from_dlpack": "gf.constant", "from_numpy": "gf.constant",
    "functional": "gf.nn itself", "gammaln": "gf.lgamma", "identity": "gf.eye", "map_fn": "gf.vmap",
    "integers": "gf.random.randint", "rand": "gf.random.uniform", "randn": "gf.random.normal",
    "randperm": "gf.random.permutation", "range": "gf.arange", "shuffle": "gf.random.permutation",
    "unsqueeze": "gf.expand_dims", "cumulative_prod": "gf.cumprod",
    "vdot": "gf.vecdot(a.reshape(-1), b.reshape(-1))",
    "inner": "gf.tensordot(a, b, ((-1,), (-1,)))",
    "argwhere": "gf.stack(gf.nonzero(x, size)[0], 1)",
    "flatnonzero": "gf.nonzero(x.reshape(-1), size)[0][0]",
    "isclose": "(a == b) | (gf.abs(a - b) <= tolerance)",
    "allclose": "gf.all((a == b) | (gf.abs(a - b) <= tolerance))",
    "digitize": "gf.searchsorted(bins, x, side='right')",
    "percentile": "gf.quantile(x, q / 100)", "nanmedian": "gf.median, of what is not NaN",
    "nanmax": "gf.max(gf.where(gf.isnan(x), -math.inf, x))",
    "nanmin": "gf.min(gf.where(gf.isnan(x), math.inf, x))",
    "nansum": "gf.sum(gf.where(gf.isnan(x), 0.0, x))",
    "nanmean": "gf.sum(gf.where(gf.isnan(x), 0.0, x)) / gf.sum(gf.where(gf.isnan(x), 0.0, 1.0))",
    "nan_to_num": "gf.clip(gf.where(gf.isnan(x), 0.0, x), low, high)",
    "average": "gf.mean(x), or gf.sum(x * w) / gf.sum(w)",
    "cbrt": "gf.where(x == 0, 0.0, gf.sign(z) * gf.abs(z) ** (1 / 3)), with "
    "z = gf.where(x == 0, 1.0, x)",
    "exp2": "2.0**x", "kron": "gf.einsum('ij,kl->ikjl', a, b), reshaped",
    "fliplr": "gf.flip(x, 1)", "flipud": "gf.flip(x, 0)", "ravel": "x.reshape(-1)",
    "logspace": "10.0 ** gf.linspace(a, b, n)", "ptp": "gf.max(x) - gf.min(x)",
    "rot90": "gf.flip(gf.swapaxes(x, 0, 1), 0)", "select": "gf.where, nested",
    "sinc": "gf.where(x == 0, 1.0, gf.sin(z) / z), with z = math.pi * gf.where(x == 0, 1.0, x)",
    "deg2rad": "x * (math.pi / 180)", "rad2deg": "x * (180 / math.pi)",
    "fmax": "gf.where(gf.isnan(x), y, gf.where(gf.isnan(y), x, gf.maximum(x, y)))",
    "fmin": "gf.where(gf.isnan(x), y, gf.where(gf.isnan(y), x, gf.minimum(x, y)))",
    "xlogy": "x * gf.log(gf.where((x == 0) & (y <= 0), 1.0, y))",
    "column_stack": "gf.stack(vectors, 1)", "dstack": "gf.stack(matrices, 2)",
}  # fmt: skip
"""Replacements for functions and classes of these libraries."""

LAYER_HINTS = {
    **dict.fromkeys(
        ("train", "eval", "training"),
        "`with gf.nn.training() as updates:` around the call that trains; model(x) outside is the "
        "model in use",
    ),
    **dict.fromkeys(("forward", "apply"), "model(x), which runs __call__"),
    **dict.fromkeys(("state_dict", "get_weights"), "model.state(session)"),
    **dict.fromkeys(
        ("load_state_dict", "load_weights", "set_weights"), "model.load(session, path_or_dict)"
    ),
    "save_weights": "model.save(session, path)",
    **dict.fromkeys(
        ("named_parameters", "trainable_variables", "trainable_weights"),
        "model.parameters(), a dict by name",
    ),
    **dict.fromkeys(
        ("weights", "variables", "named_buffers"), "model.parameters() and model.buffers()"
    ),
    **dict.fromkeys(
        ("fit", "compile", "train_on_batch"),
        "train = gf.optim.Adam(rate).minimize(loss), and gf.fit(train, data, loss=loss)",
    ),
    "predict": "session.run(model(x), {x: images})",
    "evaluate": "gf.metrics.evaluate(session, metrics, batches)",
    **dict.fromkeys(("zero_grad", "requires_grad_"), "not needed: gradients are not accumulated"),
    **dict.fromkeys(
        ("to", "cuda", "cpu"),
        "gf.Session, which places a model on this machine's devices; `with gf.device(name):` pins",
    ),
    **dict.fromkeys(("half", "float", "double", "bfloat16"), "dtype=… as the layer is made"),
    "init": "the layer, which has variables from the start; a session makes their values",
    "add": "gf.nn.Sequential(layer, layer, …)",
    **dict.fromkeys(("modules", "children", "named_modules"), "vars(model), or model.summary"),
}
"""Replacements for methods of models in torch, Keras and Flax."""

SESSION_HINTS = {
    **dict.fromkeys(("eval", "partial_run", "predict", "forward"), "s.run(fetches, feeds)"),
    **dict.fromkeys(("fit", "train"), "train = optimiser.minimize(loss) and s.run(train, feeds)"),
    **dict.fromkeys(("restore", "load_state_dict"), "s.load(folder)"),
    "state_dict": "s.get(variable) for one value, s.save(folder) for all",
    "as_default": "`with gf.Session() as s:`, and s.run(fetches, feeds) in the block",
    "graph": "gf.Graph(tensors), of what is fetched: there is no default graph",
}
"""Replacements for attributes of sessions, models and graphs in other libraries."""


MODULE_CALL_HINTS = {
    "tensor": "gf.constant(value) makes a tensor, gf.placeholder(dtype, shape) one that is fed",
    "graph": "gf.Graph(tensors) is the graph of tensors, and gf.Session runs them without one",
    "session": "gf.Session() opens a session", "node": "ops such as gf.add make nodes",
    "op": "gf.register_op makes an op", "init": "gf.init.glorot(shape), gf.init.he(shape) … do",
    "functions": "@gf.function traces a function", "autodiff": "gf.gradients(loss, variables) does",
    "state": "s.get(variable) reads a session's state", "values": "s.run(tensor) gives values",
    "random": 'gf.random.uniform(shape), gf.random.normal(shape) … make random numbers',
    "optim": "gf.optim.Adam(0.001).minimize(loss) … train", "half": 'x.astype("float16") converts',
    "placement": "gf.plan(fetches, cluster) places a graph",
    "planner": "gf.plan(fetches, cluster) places a graph",
    "onnx": "gf.onnx.load(path) reads a model", "updates": "gf.assign(variable, value) updates",
    "strategy": "gf.parallel.Data(…) and its like are strategies", "batched": "gf.vmap(f) does",
    "control": "gf.cond, gf.while_loop and gf.scan do", "running": "s.run(fetches, feeds) runs",
    "spec": "gf.spec(dtype, shape) does", "dtypes": 'a dtype is a word, such as "float32"',
}  # fmt: skip
"""Replacements for modules that are called like functions, or sought under such a name."""


class HintingModule(ModuleType):
    """The class of graphflow's public modules: calling one raises an error with a replacement."""

    def __getattr__(self, name: str) -> Any:
        # Called for missing names only. A module's own __getattr__ has better hints.
        own = self.__dict__.get("__getattr__")
        if own is not None:
            return own(name)
        message = f"module {self.__name__!r} has no attribute {name!r}"
        if name in FUNCTION_HINTS:
            message += f"; it is {FUNCTION_HINTS[name]}"
            raise AttributeError(message, name=name, obj=self)
        hint = "" if name.startswith("__") else did_you_mean(name, self.__dict__.get("__all__", ()))
        raise AttributeError(f"{message}; {hint}" if hint else message, name=name, obj=self)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        shown = vars(
            sys.modules["graphflow"]
        ).items()  # the public name of a module may differ from its file's
        name = next((n for n, m in shown if m is self), self.__name__.rpartition(".")[2])
        public = getattr(self, "__all__", ())
        hint = MODULE_CALL_HINTS.get(name)
        if hint is None and public:
            some = ", ".join(f"gf.{name}.{each}" for each in public[:3])
            hint = f"call something in it: {some}, …"
        hint = hint or "dir(gf) lists what there is to call"
        raise ArgumentError(f"gf.{name}(…) at {user_location()}: gf.{name} is a module; {hint}")


class HintingClass(type):
    """The class of public classes whose missing names raise an error with a replacement."""

    def __getattr__(cls, name: str) -> NoReturn:
        message = f"{cls.__name__} has no attribute {name!r}"
        if name in FUNCTION_HINTS:
            message += f"; it is {FUNCTION_HINTS[name]}"
        raise AttributeError(message, name=name, obj=cls)


def install_module_hints(package: ModuleType) -> None:
    """Let the modules in a package's namespace raise errors with hints (see `HintingModule`)."""
    for found in vars(package).values():
        if type(found) is ModuleType and found.__name__.startswith("graphflow."):
            found.__class__ = HintingModule


def attribute_hint(name: str) -> str:
    """Return a hint for an attribute that tensors do not have; "" where none is known."""
    if name in ATTRIBUTE_HINTS:
        return f"; use {ATTRIBUTE_HINTS[name]}"
    if name.endswith("_") and name.islower():  # torch marks in-place methods so
        return "; tensors do not change: ops make new ones, gf.assign(variable, value) sets one"
    for room in ("", "nn.", "linalg.") if name in FUNCTIONS else ():
        module = sys.modules["graphflow"]
        if name in getattr(module, room[:-1], module).__all__:
            return f"; use gf.{room}{name}(x, …)"
    return f"; use {FUNCTION_HINTS[name]}" if name in FUNCTION_HINTS else ""


def missing_attribute_error(path: str, name: str) -> AttributeError:
    """Return the error for a name that the public module at `path`, `gf.<last part>`, lacks."""
    message = f"gf.{path.rpartition('.')[2]} has no attribute {name!r}"
    module = sys.modules[path]
    if name in FUNCTION_HINTS:
        message += f"; it is {FUNCTION_HINTS[name]}"
    elif not name.startswith("__") and (
        hint := did_you_mean(name, module.__dict__.get("__all__", ()))
    ):
        message += f"; {hint}"
    return AttributeError(message, name=name, obj=module)


def unsupported_message(function: Any, what: str) -> str:
    """Return the error message for a function of numpy that was given `what`, a tensor."""
    name = ARRAY_API_NAMES.get(function.__name__, function.__name__)
    part = str(getattr(function, "__module__", "")).removeprefix("numpy.")
    room = f"{part}." if part in ("linalg", "fft") else ""
    op = f"gf.{room}{name}, or " if name.rpartition(".")[2] in FUNCTIONS else ""
    if not op and not room and name in FUNCTION_HINTS:
        op = f"{FUNCTION_HINTS[name]}; or "
    return (
        f"np.{room}{function.__name__} at {user_location()}: {what} is symbolic while the graph is "
        f"built; use {op}Session.run for values"
    )
