"""A call of every public function that works; tests spoil it argument by argument.

`call_of` finds the arguments by name, or makes some for functions of one or two tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

import graphflow as gf
from graphflow.base.argument_checks import signature_of
from graphflow.ir.op import Op

Call = tuple[list[Any], dict[str, Any]]


def _f(*shape: Any) -> gf.Tensor:
    return gf.placeholder("float32", shape)


def _i(*shape: Any) -> gf.Tensor:
    return gf.placeholder("int64", shape)


F, M, V, S, IMG = _f(3, 4), _f(4, 4), _f(4), _f(), _f(2, 4, 8, 8)
LINE, VOLUME, HEADS, SEQ = _f(2, 4, 8), _f(1, 4, 4, 4, 4), _f(2, 2, 3, 4), _f(5, 2, 3)
INTS, I34, PAIRS = _i(3), _i(3, 4), _i(5, 2)
B, Z = gf.placeholder("bool", (3, 4)), gf.placeholder("complex64", (3, 4))
WEIGHT = {1: _f(4, 4, 3), 2: _f(4, 4, 3, 3), 3: _f(4, 4, 3, 3, 3)}
IMAGE = {1: LINE, 2: IMG, 3: VOLUME}
v = gf.variable(np.ones((3, 4), "float32"), name="v")
loss = gf.mean(gf.square(F * v))
AVERAGING = gf.optim.MovingAverage(gf.optim.SGD(0.1)).minimize(loss)
DATA = gf.data.arrays(x=np.arange(10)).batch(4)
NAMED = gf.placeholder("float32", (None, 4), name="named")
NAMED_LOSS = gf.mean(gf.square(NAMED * gf.variable(np.ones(4, "float32"), name="named/w")))
TRAINING: dict[str, Any] = {
    "train": gf.optim.SGD(0.1).minimize(NAMED_LOSS), "loss": NAMED_LOSS,
}  # fmt: skip
SPARSE = gf.sparse.from_dense(np.eye(4, dtype="float32"))
HERE = gf.Cluster.here(devices=["cpu:0", "cpu:1"])
SCHEDULE = gf.parallel.one_f_one_b(2, 4)
GPT = gf.parallel.GPT(layers=2, width=64, heads=4)


def _arrays() -> dict[str, Any]:
    edges = np.array([[0, 1], [1, 2]])
    return {"compute": np.ones((3, 2)), "edges": edges, "bytes": np.ones(2)}


PROBLEM = gf.placement.Problem(**_arrays())


def _arrays_of(columns: Any) -> Any:
    return gf.data.arrays(columns)


def _same(arguments: dict[str, Any], *names: str) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(names, arguments)


BUILDING: dict[str, Any] = {
    "check_training": TRAINING | {"batch": {"named": np.ones((2, 4), "float32")}, "steps": 2},
    "arange": {"start": 3}, "assign": {"variable": v, "value": F},
    "astype": {"x": F, "dtype": "float64"}, "bitcast": {"x": F, "dtype": "int32"},
    "autocast": {"dtype": "bfloat16"}, "bincount": {"x": INTS, "size": 4},
    "broadcast_arrays": [F, S], "broadcast_to": {"x": F, "shape": (2, 3, 4)},
    "call": [gf.exp, F], "checkpoint": {"fn": abs}, "function": {"fn": abs},
    "custom_jvp": {"fn": abs, "jvp": abs}, "custom_vjp": {"fn": abs, "vjp": abs},
    "associative_scan": {"f": gf.add, "xs": F}, "clip": {"x": F, "min": 0.0, "max": 1.0},
    "complex": {"re": F, "im": F}, "concat": {"arrays": [F, F]}, "stack": {"arrays": [F, F]},
    "compress": {"condition": gf.placeholder("bool", (3,)), "x": F, "size": 2, "axis": 0},
    "cond": [gf.placeholder("bool"), gf.exp, gf.negative, F], "constant": {"value": 1.0},
    "cumprod": {"x": F, "axis": 0}, "cumsum": {"x": F, "axis": 0},
    "device": {"name": "cpu:0"}, "diagonal": {"x": M}, "diag": {"x": V}, "diag_embed": {"x": F},
    "convolve": {"a": V, "v": V}, "interp": {"x": F, "xp": V, "fp": V}, "histogram": {"x": F},
    "nextafter": {"x": F, "y": F},
    "isin": {"x": INTS, "values": I34}, "logcumsumexp": {"x": F, "axis": 0},
    "masked_fill": {"x": F, "mask": B, "value": 0.0},
    "segment_sum": {"x": F, "ids": INTS, "count": 4},
    "diff": {"x": F},
    "divide": {"a": F, "b": F}, "einsum": ["ij,jk->ik", F, M], "eye": {"n_rows": 3},
    "full": {"shape": (2,), "value": 1.0}, "full_like": {"x": F, "value": 1.0},
    **_same({"a": F, "x": V}, "gammainc", "gammaincc"),
    "gather": {"x": F, "indices": I34}, "gather_nd": {"x": F, "indices": PAIRS},
    "gradients": {"y": loss, "xs": [v]}, "Graph": {"outputs": [F]},
    "host_call": {"fn": abs, "spec": gf.spec("float32", (3, 4))},
    "index_add": {"x": F, "indices": INTS, "updates": F},
    "scatter_add": {"x": F, "indices": INTS, "updates": F},
    **_same({"y": loss, "x": v}, "hessian", "jacobian"),
    "vjp": {"target": gf.sin, "inputs": [F], "cotangents": F},
    "jvp": {"target": gf.exp, "inputs": [F], "tangents": [F]},
    "linspace": {"start": 0.0, "stop": 1.0, "num": 4}, "matmul": {"a": F, "b": M},
    "meshgrid": [INTS, INTS],
    "moveaxis": {"x": F, "source": 0, "destination": 1}, "name_scope": {"name": "a"},
    "nonzero": {"x": F, "size": 4}, "one_hot": {"indices": INTS, "depth": 4},
    "ones": {"shape": (2,)}, "zeros": {"shape": (2,)}, "outer": {"a": V, "b": V},
    "pad": {"x": F, "widths": 1}, "permute_dims": {"x": F, "axes": (1, 0)},
    "placeholder": {"dtype": "float32", "shape": (2,)},
    "plan": {"fetches": [loss], "cluster": HERE},
    "polygamma": {"n": 1, "x": F}, "quantile": {"x": F, "q": 0.5},
    "pow": {"x": F, "exponent": 2.0}, "put_along_axis": {"x": F, "indices": I34, "values": F},
    "ravel_multi_index": {"indices": [INTS, INTS], "shape": (3, 4)},
    "repeat": {"x": F, "repeats": 2},
    "reshape": {"x": F, "shape": (4, 3)}, "roll": {"x": F, "shift": 1},
    "scan": [lambda c, x: (c, x), S, V], "scatter": {"x": F, "indices": I34, "updates": F},
    "scatter_nd": {"x": F, "indices": PAIRS, "updates": _f(5)},
    "searchsorted": {"sorted": V, "values": F}, "sample": {"low": 0.0},
    "spec": {"dtype": "float32", "shape": (2,)}, "split": {"x": F, "parts": 3},
    "squeeze": {"x": _f(1, 3)}, "swapaxes": {"x": F, "axis1": 0, "axis2": 1},
    "take": {"x": F, "indices": INTS, "axis": 0}, "take_along_axis": {"x": F, "indices": I34},
    "tensordot": {"a": F, "b": M, "axes": 1}, "tile": {"x": F, "repetitions": 2},
    "top_k": {"x": F, "k": 2}, "trace": {"x": M}, "variable": {"initial": np.ones(3, "float32")},
    "vecdot": {"a": V, "b": V}, "vmap": {"fn": gf.exp},
    "where": {"condition": B, "a": F, "b": F},
    "while_loop": {"cond_fn": lambda c: gf.less(c, 3.0), "body_fn": gf.exp, "init": S},
    **_same({"x": INTS, "size": 3}, "unique_all", "unique_counts", "unique_inverse",
            "unique_values"),
}  # fmt: skip

NETWORKS: dict[str, Any] = {
    **_same({}, "GELU", "GLU", "Hardswish", "Identity", "Mish", "ReLU", "ReLU6", "SELU", "SiLU",
            "Sigmoid", "Softplus", "Tanh", "Flatten"),
    "Dropout2d": {"rate": 0.5}, **_same({"channels": 4}, "InstanceNorm", "PReLU"),
    **_same({"kernel": 2}, *(f"{kind}Pool{d}d" for kind in ("Avg", "Max") for d in (1, 2, 3))),
    **_same({"size": 2}, "AdaptiveAvgPool", "AdaptiveMaxPool", "Upsample"),
    **_same({"channels": 4}, "BatchNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d"),
    **{f"{kind}{n}d": {"inputs": 4, "outputs": 4, "kernel": 3}
       for kind in ("Conv", "ConvTranspose") for n in (1, 2, 3)},
    **{f"{kind}{of}": {"inputs": 3, "size": 4}
       for kind in ("GRU", "LSTM", "RNN") for of in ("", "Cell")},
    **{f"{kind}_pool{n}d": {"x": IMAGE[n], "kernel": 2}
       for kind in ("avg", "max", "lp") for n in (1, 2, 3)},
    **{f"conv{kind}{n}d": {"x": IMAGE[n], "weight": WEIGHT[n]}
       for kind in ("", "_transpose") for n in (1, 2, 3)},
    **_same({"x": IMG, "kernel": 2}, "avg_pool", "max_pool", "lp_pool", "unfold"),
    **_same({"x": IMG, "weight": WEIGHT[2]}, "conv", "conv_transpose"),
    **_same({"x": IMG}, "global_avg_pool", "global_max_pool", "global_lp_pool", "instance_norm"),
    **_same({"x": IMG, "size": 2}, "adaptive_avg_pool", "adaptive_max_pool"),
    **_same({"x": IMG, "size": (4, 4)}, "interpolate", "resize"),
    **_same({"x": IMG, "block": 2}, "depth_to_space", "space_to_depth"),
    **_same({"x": IMG, "factor": 2}, "pixel_shuffle", "pixel_unshuffle"),
    **_same({"prediction": F, "target": F}, "binary_cross_entropy", "huber_loss", "l1_loss",
            "mse_loss", "smooth_l1_loss"),
    **{kind: {"x": SEQ, "w": _f(1, 6 * gates, 3), "r": _f(1, 6 * gates, 6)}
       for kind, gates in (("rnn", 1), ("gru", 3), ("lstm", 4))},
    "Dropout": {"rate": 0.5}, "Embedding": {"number": 4, "size": 4},
    "HashTable": {"dim": 4, "capacity": 8},
    "EmbeddingBag": {"rows": 4, "dim": 4}, "embedding_bag": {"ids": I34, "table": F},
    "GroupNorm": {"groups": 2, "channels": 4}, "LayerNorm": {"shape": 4}, "RMSNorm": {"shape": 4},
    **_same({"size": 4, "heads": 2}, "Transformer", "TransformerDecoder", "TransformerDecoderLayer",
            "TransformerEncoder", "TransformerEncoderLayer"),
    **_same({"layer": gf.nn.Linear(3, 2)}, "spectral_norm", "weight_norm"),
    "ctc_loss": {"log_probabilities": _f(3, 4), "targets": _i(1)},
    "Linear": {"inputs": 3, "outputs": 4}, "MultiHeadAttention": {"size": 4, "heads": 2},
    "TransformerBlock": {"size": 4, "heads": 2}, "Sequential": [gf.exp],
    "affine_grid": {"theta": _f(2, 2, 3), "size": (2, 4, 8, 8)},
    "attention": {"q": HEADS, "k": HEADS, "v": HEADS},
    "batch_norm": {"x": IMG, "scale": V, "bias": V, "mean": V, "variance": V},
    "binary_cross_entropy_with_logits": {"logits": F, "target": F},
    "cosine_similarity": {"a": F, "b": F}, "cross_entropy": {"logits": F, "labels": INTS},
    "nll_loss": {"log_probabilities": F, "labels": INTS},
    "deform_conv": {"x": IMG, "weight": WEIGHT[2], "offset": _f(2, 18, 6, 6)},
    "dropout": {"x": F, "rate": 0.5}, "embedding": {"ids": INTS, "table": F},
    "fold": {"columns": _f(2, 16, 49), "output_size": (8, 8), "kernel": 2},
    "grid_sample": {"x": IMG, "grid": _f(2, 5, 5, 2)}, "group_norm": {"x": IMG, "groups": 2},
    "cdist": {"a": F, "b": M}, "gumbel_softmax": {"logits": F},
    "focal_loss": {"logits": F, "target": F},
    "gaussian_nll_loss": {"prediction": F, "target": F, "variance": F},
    "poisson_nll_loss": {"prediction": F, "target": F},
    "cosine_embedding_loss": {"a": F, "b": F, "target": _f(3)},
    "hinge_embedding_loss": {"distance": F, "target": F},
    "kl_div": {"log_prediction": F, "target": F}, "local_response_norm": {"x": IMG, "size": 3},
    "margin_ranking_loss": {"a": F, "b": F, "target": F},
    "triplet_margin_loss": {"anchor": F, "positive": F, "negative": F},
    "max_unpool": {"x": _f(2, 4, 4, 4), "indices": _i(2, 4, 4, 4), "kernel": 2},
    "non_max_suppression": {"boxes": _f(2, 5, 4), "scores": _f(2, 3, 5), "max_output": 2},
    "roi_align": {"x": IMG, "boxes": _f(3, 4), "batch": INTS, "size": (2, 2)},
    "rotary": {"x": HEADS}, "rotate": {"x": HEADS, "cos": _f(3, 2), "sin": _f(3, 2)},
}  # fmt: skip

MATHEMATICS: dict[str, Any] = {
    **_same({"x": M}, "cholesky", "cond", "det", "diagonal", "eig", "eigh", "eigvals", "eigvalsh",
            "inv", "lu", "matrix_exp", "matrix_norm", "matrix_rank", "matrix_transpose",
            "norm", "pinv", "qr", "logdet", "slogdet", "svd", "svdvals", "trace", "vector_norm"),
    **_same({"a": M, "b": M}, "lstsq", "matmul", "solve", "triangular_solve"),
    "cholesky_solve": {"b": M, "factor": M},
    **_same({"x": Z}, "fft", "ifft", "fft2", "ifft2", "fftn", "ifftn", "hfft", "irfft", "irfft2",
            "irfftn", "fftshift", "ifftshift"),
    **_same({"x": F}, "ihfft", "rfft", "rfft2", "rfftn"),
    **_same({"n": 4}, "fftfreq", "rfftfreq"),
    **_same({"size": 4}, "blackman_window", "hamming_window", "hann_window"),
    "cross": {"a": _f(4, 3), "b": _f(4, 3)}, "matrix_power": {"x": M, "n": 2},
    "multi_dot": {"arrays": [F, M, M]}, "outer": {"a": V, "b": V}, "vecdot": {"a": V, "b": V},
    "tensordot": {"a": F, "b": M, "axes": 1},
    "CSR": vars(SPARSE), "csr": vars(SPARSE), "from_dense": {"array": np.eye(3, dtype="float32")},
    "spmm": {"matrix": SPARSE, "dense": M}, "spmv": {"matrix": SPARSE, "vector": V},
    "to_dense": {"matrix": SPARSE}, "frame": {"x": _f(16), "length": 4, "step": 2},
    "overlap_add": {"x": F, "step": 2}, "stft": {"x": _f(16), "frame_length": 4, "frame_step": 2},
    "istft": {"spectra": gf.placeholder("complex64", (7, 3)), "frame_length": 4, "frame_step": 2},
    "mel_weight_matrix": {
        "num_mel_bins": 4, "dft_length": 16, "sample_rate": 8000.0, "lower_edge_hertz": 20.0,
        "upper_edge_hertz": 3000.0,
    },
    "bernoulli": {"p": 0.5, "shape": (2,)}, "categorical": {"logits": F},
    "seed": {"value": 3}, "normal": {"shape": (2,)}, "randint": {"low": 5, "shape": (2,)},
    "uniform": {"shape": (2,)}, "choice": {"x": 4, "shape": (2,)},
    "dirichlet": {"alpha": [0.5, 2.0, 1.0], "shape": (2,)},
    **_same({"shape": (2,)}, "beta", "exponential", "gamma", "gumbel", "poisson",
            "truncated_normal"),
    "check": {"x": F, "condition": B, "message": "m"},
    "print": {"x": F},
}  # fmt: skip

INITIAL: dict[str, Any] = {
    **_same({"shape": (2, 3)}, "glorot", "he", "lecun", "normal", "ones", "orthogonal",
            "truncated_normal", "uniform", "zeros"),
    "full": {"shape": (2, 3), "value": 1.0},
    **_same({"lr": 0.1}, "SGD", "Adagrad", "Adam", "AdamW", "RMSProp", "RowwiseAdagrad", "LAMB",
            "LARS", "LBFGS", "Adadelta", "Adafactor", "Lion", "Muon", "NAdam", "RAdam"),
    "Groups": {"rules": {"*": gf.optim.SGD(0.1)}, "rest": None},
    "Accumulate": {"inner": gf.optim.SGD(0.1), "steps": 2},
    "MovingAverage": {"inner": gf.optim.SGD(0.1)},
    "apply_averages": {"outputs": F, "train": AVERAGING},
    "RateSchedule": {"rate": lambda step: 0.1},
    "LossScaling": {}, "DelayCompensated": {"inner": gf.optim.SGD(0.1), "lam": 0.1},
    "Emso": {"inner": gf.optim.SGD(0.1), "inner_steps": 2, "gamma": 1.0},
    **_same({"grads": [F, M], "max_norm": 1.0}, "clip_by_global_norm", "clip_by_norm"),
    "clip_by_value": {"grads": [F, M], "limit": 1.0},
}  # fmt: skip

LABELS = _i(3)
METRICS: dict[str, Any] = {
    "accuracy": {"outputs": F, "labels": LABELS},
    "auc": {"scores": LABELS, "labels": LABELS}, "top_k": {"outputs": F, "labels": LABELS, "k": 2},
    **_same({"outputs": LABELS, "labels": LABELS, "classes": 2}, "confusion_matrix", "f1",
            "precision", "recall"),
    "mean": {"values": F}, "perplexity": {"losses": F},
    **_same({"outputs": F, "targets": F}, "mae", "mse", "r2"),
    "Metric": {"parts": [F], "finish": lambda totals: totals[0]},
}  # fmt: skip

PARALLEL: dict[str, Any] = {
    "GPT": {"layers": 2, "width": 64, "heads": 4}, "Data": {"replicas": 2},
    "Pipeline": {"stages": 2}, "Shard": {"mesh": {"a": 2}, "rules": {"v": ("a",)}},
    **_same({"tensors": [M, M]}, "all_gather", "all_reduce", "reduce_scatter", "all_to_all"),
    **_same({"stages": 2, "microbatches": 4}, "chimera", "gpipe", "interleaved", "one_f_one_b",
            "pipedream", "zb_h1", "zb_h2", "zb_v"),
    "broadcast": {"tensor": F, "count": 2}, "draw": {"schedule": SCHEDULE},
    "run": {"schedule": SCHEDULE, "forward": 1.0, "backward": 1.0},
    "staleness": {"schedule": SCHEDULE, "stage": 0},
    "what_if": {"model": GPT, "devices": 2, "batch": 4},
    **_same({"replicas": 2}, "LocalSGD", "Gossip"), "AsyncModel": {"axis": "a", "refresh": 2},
    "BlockProximal": {"blocks": 4}, "BlockScheduled": {"parallel": 2}, "Jitter": {"share": 0.1},
    "ParameterServer": {"servers": 2}, "FixedPoint": {"bits": 8}, "TopK": {"share": 0.1},
    "PowerSGD": {"rank": 2},
    "Chain": {"filters": [gf.parallel.TopK(0.1)]}, "Kkt": {"penalty": 0.1}, "KeyCache": {},
    "RandomSkip": {"keep": 0.5}, "Lossless": {}, "Significant": {"delta": 0.1},
    "check_filter": {"rule": gf.parallel.FixedPoint(8), "shape": (8, 4), "rounds": 4},
}  # fmt: skip

PLACEMENT: dict[str, Any] = {
    "Cluster": {"workers": HERE.workers}, "Level": {"workers": 2, "bandwidth": 1e9},
    "Device": {"name": "/worker:0/cpu:0", "kind": "cpu", "memory": 10**9},
    "Worker": {"index": 0, "address": None, "devices": HERE.workers[0].devices},
    "Link": {
        "source": "/worker:0/cpu:0", "target": "/worker:0/cpu:1", "latency": 1e-6, "bandwidth": 1e9,
    },
    "Port": {"name": "nic", "inside": ("/worker:0",), "outside": None, "bandwidth": 1e9},
    "Assignment": {"device": np.array([0, 1, 0]), "order": np.array([0, 1, 2])},
    "Problem": _arrays(), "get_placer": {"placer": "heft"}, "place": {"problem": PROBLEM},
    "pipedream_plan": {
        "seconds": [1.0, 2.0], "activations": [1.0, 1.0], "weights": [1.0, 1.0],
        "levels": [gf.placement.Level(2, 1e9)],
    },
    "simulate": {"problem": PROBLEM, "assignment": gf.placement.place(PROBLEM)},
    "split_stages": {"problem": PROBLEM, "stages": 2},
    "sweep": {"fetches": [loss], "clusters": [HERE]},
    "compare": {"plans": [gf.plan([loss], HERE)] * 2},
}  # fmt: skip

ROOMS: dict[str, dict[str, Any]] = {
    "": BUILDING | {name: PLACEMENT[name] for name in ("Cluster", "Device", "Link", "Worker")},
    "nn": NETWORKS,
    **dict.fromkeys(("random", "linalg", "fft", "sparse", "signal", "debug"), MATHEMATICS),
    **dict.fromkeys(("init", "optim"), INITIAL),
    "metrics": METRICS,
    "parallel": PARALLEL,
    "placement": PLACEMENT,
}

NOT_CALLED = {
    "Cost", "Node", "Op", "Plan", "Tensor", "TensorSpec", "Session", "Optimizer", "Target",
    "Report", "Search", "Schedule", "Task", "Initializer", "Layer", "Comparison", "Difference",
    "PipePlan", "Placer", "Filter", "FilterCheck", "BlockProgress",
    "Product", "Split", "Sweep", "Timeline", "Wire", "check_op",
    "register_op", "register_placer", "placer_names", "from_scipy", "training", "auto",
    "evaluate", "fit",
}  # fmt: skip
"""Results, bases, what changes a registry, and what takes long or takes nothing."""


@cache
def methods() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Methods of what users hold, with arguments by which they work in a folder of their own."""
    one, other = gf.plan([loss], HERE), gf.plan([loss], HERE, placer="heft")
    session, feeds = gf.Session(HERE), {F: np.ones((3, 4), "float32")}
    session.run(loss, feeds)
    rows = gf.placeholder("float32", (None, 4))
    shaped = {"shapes": {rows: (3, 4)}}

    def open_session(**arguments: Any) -> None:
        with gf.Session(**arguments):
            pass

    def open_with_checkpoints(**arguments: Any) -> None:
        open_session(checkpoint="steps", **arguments)

    def trace_steps(**arguments: Any) -> None:
        with session.trace(**arguments):
            pass

    def stream_steps(**arguments: Any) -> None:
        list(session.run(**arguments))

    def run_ahead(**arguments: Any) -> None:
        session.run_async(**arguments).result()

    return {
        "Session": (open_session, dict.fromkeys(signature_of(gf.Session).parameters) | {
            "strict": True,
            "cluster": HERE, "placer": "heft", "deadline": 9.0, "ops": (), "trial": False,
            "check_finite": False, "flush_denormals": False, "replicas": 1,
        }),
        "Session, checkpoint": (open_with_checkpoints, {"every": 2, "keep": 2, "rejoin": 1.0}),
        "Session.run": (session.run, {"fetches": loss, "feeds": feeds}),
        "Dataset.shuffle": (DATA.shuffle, {"seed": 1, "blocks": 2}),
        "Dataset.batch": (DATA.batch, {"size": 3, "drop_last": True}),
        "Dataset.map": (DATA.map, {"function": lambda batch: batch, "seed": 1}),
        "Dataset.epochs": (DATA.epochs, {"count": 2}),
        "Dataset.prefetch": (DATA.prefetch, {"batches": 2}),
        "Dataset.split": (DATA.split, {"share": 0.5, "seed": 1}),
        "Dataset.position": (DATA.position, {"step": 3}),
        "Dataset.read": (DATA.read, {"position": (0, 1)}),
        "Dataset.row_numbers": (DATA.row_numbers, {"position": (0, 1)}),
        "Dataset.columns": (DATA.columns, {}),
        "Dataset.start": (DATA.start, {"step": 3}),
        "Dataset.positions": (DATA.positions, {"step": 3}),
        "Dataset.batch_rows": (DATA.batch_rows, {"position": (0, 1)}),
        "Dataset, arrays": (_arrays_of, {"columns": {"x": np.ones(3)}}),
        "Dataset, rows": (lambda rows, names: gf.data.wrap(rows, names).batch(2).read((0, 0)),
                      {"rows": [1.0, 2.0, 3.0], "names": ["x"]}),
        "Session.run, steps": (stream_steps, {"fetches": loss, "feeds": [feeds], "steps": 1}),
        "Session.run, a feed": (lambda feed: session.run(gf.exp(rows), {rows: feed}),
                                {"feed": np.ones((3, 4), "float32")}),
        "Session.run_async": (run_ahead, {"fetches": loss, "feeds": feeds}),
        "Session.compile": (session.compile, {"fetch_sets": [[rows * 2.0]], **shaped}),
        "Session.compile, a shape": (lambda shape: session.compile([rows + 1.0], {rows: shape}),
                                     {"shape": (3, 4)}),
        "Session.warmup": (session.warmup, {"fetches": rows * 3.0, **shaped}),
        "Session.plan": (session.plan, {"fetches": loss}),
        "Session.memory": (session.memory, {"fetches": loss}),
        "Session.history": (session.history, {"fetches": loss}),
        "Session.get": (session.get, {"variable": v}),
        "Session.set": (session.set, {"variable": v, "value": np.ones((3, 4), "float32")}),
        "Session.set_all": (session.set_all, {"values": {v: np.ones((3, 4), "float32")}}),
        "Session.save": (session.save, {"folder": "kept"}),
        "Session.load": (session.load, {"folder": "kept"}),
        "Session.trace": (trace_steps, {"path": "trace.json", "memory": False}),
        "Plan.compare": (one.compare, {"other": other}),
        "Plan.diff": (one.diff, {"other": other}),
        "Plan.explain": (one.explain, {"name": loss.name}),
        "Plan.save": (one.save, {"path": "plan.json"}),
        "Plan.load": (type(one).load, {"path": "plan.json"}),
        "Cluster.here": (gf.Cluster.here, {"devices": ["cpu:0"], "threads": 1}),
        "Cluster.local": (gf.Cluster.local, {"workers": 2}),
        "Cluster.hypothetical": (gf.Cluster.hypothetical, {"workers": "2xh100"}),
        "Cluster.from_dict": (gf.Cluster.from_dict, {"data": HERE.to_dict()}),
        "Cluster.load": (gf.Cluster.load, {"path": "cluster.toml"}),
        "Cluster.device": (HERE.device, {"name": HERE.devices[0]}),
        "Cluster.match": (HERE.match, {"constraint": "cpu"}),
        "Graph.of_op": (gf.Graph([loss]).of_op, {"name": "mean"}),
        "Graph.rewrite": (gf.Graph([loss]).rewrite, {"replace": lambda node, inputs: None}),
    }  # fmt: skip


OF_THE_HOUSE = {
    "Session.replan", "Session.close", "Session.mirrors", "Plan.report", "Plan.to_networkx",
    "Session.read_all",
    "Cluster.to_dict", "Graph.verify", "Graph.walk",
    "Session.add_server", "Session.remove_server", "Cluster.join",
    "Dataset.on_workers", "Dataset.read_part",
    "Plan.maker", "Plan.with_measured", "Cluster.link", "Cluster.pinned", "Cluster.without",
}  # fmt: skip
"""Methods that take nothing, or what only other rooms give them, often."""

PAIR = {
    "add", "atan2", "bitwise_and", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift",
    "bitwise_xor", "copysign", "equal", "floor_divide", "fmod", "greater", "greater_equal", "hypot",
    "less", "less_equal", "logaddexp", "logical_and", "logical_or", "logical_xor", "maximum",
    "minimum", "multiply", "not_equal", "remainder", "subtract", "prelu",
}  # fmt: skip


def list_public_names() -> dict[str, Callable[..., Any]]:
    """All functions and classes that users call, by name: `nn.conv`."""
    found = {}
    for room in ROOMS:
        module = getattr(gf, room) if room else gf
        for name in getattr(module, "__all__", dir(module)):
            value = getattr(module, name)
            home = str(getattr(value, "__module__", ""))
            own = isinstance(value, Op) or home.startswith("graphflow")
            called = callable(value) and not isinstance(value, ModuleType)
            if name[0] != "_" and called and own and name not in NOT_CALLED:
                found[f"{room}.{name}".lstrip(".")] = value
    return found


def call_of(name: str, function: Callable[..., Any]) -> Call:
    """Arguments with which it works."""
    room, _, short = name.rpartition(".")
    given = ROOMS[room].get(short)
    if isinstance(given, list):
        return given, {}
    if given is not None:
        return [], dict(given)
    x = INTS if short.startswith("bitwise") else B if short.startswith("logical") else F
    if short in PAIR:
        return [x, x], {}
    return ([], {"x": x}) if "x" in signature_of(function).parameters else ([x], {})
