"""Linear models: estimators with certificates, and the penalties that weights may have.

The estimators have scikit-learn's interface and need it: `pip install graphflow[linear]`. They load
when they are first used.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphflow.ir.name_hints import HintingModule
from graphflow.linear import losses
from graphflow.linear.penalties import L1, L1L2, L2, Bounds, GroupL1, Penalty

if TYPE_CHECKING:
    from graphflow.linear.estimators.glm import Glm
    from graphflow.linear.estimators.kernel_svm import SVC
    from graphflow.linear.estimators.least_squares import ElasticNet, Lasso, Ridge
    from graphflow.linear.estimators.logistic import LogisticRegression
    from graphflow.linear.estimators.pca import PCA
    from graphflow.linear.estimators.support_vectors import LinearSVC, LinearSVR
    from graphflow.linear.solvers.coordinate_descent.duhl import Duhl
    from graphflow.linear.tables.open_table import open_table as open

_ESTIMATORS = {
    "ElasticNet": "least_squares", "Glm": "glm", "Lasso": "least_squares", "LinearSVC":
    "support_vectors", "LinearSVR": "support_vectors", "LogisticRegression": "logistic",
    "PCA": "pca", "Ridge": "least_squares", "SVC": "kernel_svm",
}  # fmt: skip

_OTHERS = {
    "Duhl": ("solvers.coordinate_descent.duhl", "Duhl"),
    "open": ("tables.open_table", "open_table"),
}


def __getattr__(name: str) -> Any:
    if name in _OTHERS:
        module, attribute = _OTHERS[name]
        return getattr(import_module(f"{__name__}.{module}"), attribute)
    if name not in _ESTIMATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("sklearn")
    except ImportError:
        raise ImportError(
            f"gf.linear.{name} needs scikit-learn: pip install 'graphflow[linear]'"
        ) from None
    found = getattr(import_module(f"{__name__}.estimators.{_ESTIMATORS[name]}"), name)
    globals()[name] = found
    return found


sys.modules[__name__].__class__ = HintingModule


def __dir__() -> list[str]:
    return sorted({*globals(), *_ESTIMATORS, *_OTHERS})


__all__ = [
    "L1", "L1L2", "L2", "PCA", "SVC", "Bounds", "Duhl", "ElasticNet", "Glm", "GroupL1", "Lasso",
    "LinearSVC", "LinearSVR", "LogisticRegression", "Penalty", "Ridge", "losses", "open",
]  # fmt: skip
