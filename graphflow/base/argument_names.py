"""Names that arguments have in other libraries (PyTorch, JAX, TensorFlow, numpy, onnxruntime).

An error about an unknown argument says what it is called here.
"""

from __future__ import annotations

from collections.abc import Sequence

_PLACE = 'build it in a block `with gf.device("/worker:0/gpu:0"):` instead'
_DEVICES = 'give cluster=gf.Cluster.here(devices=["gpu:0"]), or pin nodes by gf.device'

# For each foreign name the names used here: the first that the function takes is suggested. An
# entry with spaces is a sentence to show as it is.
_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("dim", "dims", "reduction_indices"), ("axis", "axes")),
    **dict.fromkeys(("keepdim", "keep_dims"), ("keepdims",)),
    **dict.fromkeys(("learning_rate", "rate", "step_size"), ("lr",)),
    **dict.fromkeys(("beta_1", "b1"), ("beta1",)), **dict.fromkeys(("beta_2", "b2"), ("beta2",)),
    "betas": ("give beta1=… and beta2=…, one by one",),
    "eps": ("epsilon",), **dict.fromkeys(("wd", "decay"), ("weight_decay",)),
    **dict.fromkeys(("size", "sizes", "dims"), ("shape", "size", "axis", "axes")),
    "loc": ("mean",), **dict.fromkeys(("scale", "stddev", "sigma"), ("std",)),
    "minval": ("low",), "maxval": ("high",), "p": ("rate", "ord"),
    **dict.fromkeys(("in_features", "in_channels", "input_size", "input_dim"), ("inputs",)),
    **dict.fromkeys(
        ("out_features", "out_channels", "hidden_size", "units", "filters", "features"),
        ("outputs", "size", "hidden"),
    ),
    "num_embeddings": ("number", "rows"), "embedding_dim": ("size", "dim"),
    "num_features": ("channels",), "kernel_size": ("kernel",), "strides": ("stride",),
    **dict.fromkeys(("dilations", "dilation_rate"), ("dilation",)), "use_bias": ("bias",),
    "padding_idx": ("padding_id",), "num_classes": ("depth",),
    **dict.fromkeys(("wrt", "sources"), ("xs",)),
    **dict.fromkeys(("grad_outputs", "output_gradients"), ("grad_ys",)),
    **dict.fromkeys(("var_list", "params", "parameters"), ("variables",)),
    **dict.fromkeys(("feed", "feed_dict", "feeds_dict", "input_feed"), ("feeds",)),
    "inputs": ("feeds", "x"), "input": ("x", "logits", "prediction"),
    **dict.fromkeys(("fetch", "output_names"), ("fetches",)),
    **dict.fromkeys(("path", "filename", "file", "save_path"), ("folder", "path")),
    "requires_grad": ("trainable", "gf.gradients(loss, [x]) differentiates with respect to any x"),
    "device": ("cluster", _PLACE), "devices": ("cluster",), "target": ("cluster", "labels"),
    **dict.fromkeys(("graph", "config", "options", "run_metadata"), ("leave it out: there is no "
    "default graph, and a session runs what it is given",)),
}  # fmt: skip
_SENTENCES = {"cluster": _DEVICES}
_REPEATED = {"lr": "an optimiser takes its variables in minimize(loss, variables)"}


def translate_argument(word: str, names: Sequence[str]) -> str:
    """Return what to write instead of the argument `word` of a function that takes `names`.

    The result is "" if the table has no entry for it.
    """
    for ours in _NAMES.get(word, ()):
        if " " in ours:
            return ours
        if ours in names:
            return _SENTENCES.get(ours, f"it is {ours!r} here")
    return ""


def explain_repeated(word: str) -> str:
    """Return the remedy for an argument that a call gives by position and by name."""
    return _REPEATED.get(word, f"the call gives {word} by position already")
