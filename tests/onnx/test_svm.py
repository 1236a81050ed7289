"""Support vector machines against scikit-learn, which has the same kernels and signs."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import graphflow as gf
from graphflow.errors import UnsupportedOnnxError
from tests.onnx.models import info, model

svm = pytest.importorskip("sklearn.svm")
RNG = np.random.default_rng(0)
KERNELS = ["linear", "poly", "rbf", "sigmoid"]


def machine(op: str, outputs: list[Any], **attrs: Any) -> gf.onnx.Model:
    names = [output.name for output in outputs]
    node = helper.make_node(op, ["x"], names, domain="ai.onnx.ml", **attrs)
    return gf.onnx.load(model([node], [info("x", ["N", 6])], outputs, ai_onnx_ml=3))


def fit_svc(kernel: str, classes: int) -> tuple[Any, dict[str, Any]]:
    x = RNG.standard_normal((90, 6)).astype("float32")
    y = (x @ RNG.standard_normal((6, classes))).argmax(1)
    found = svm.SVC(kernel=kernel, gamma=0.1, coef0=0.5, degree=3).fit(x, y)
    sign = 1 if classes > 2 else -1  # scikit-learn turns the sign of two classes
    return found, {
        "kernel_type": kernel.upper(),
        "kernel_params": [0.1, 0.5, 3.0],
        "vectors_per_class": [int(n) for n in found.n_support_],
        "support_vectors": found.support_vectors_.ravel().tolist(),
        "coefficients": (sign * found.dual_coef_).ravel().tolist(),
        "rho": (sign * found.intercept_).tolist(),
    }


def label_and_scores(code: int = TensorProto.INT64) -> list[Any]:
    return [helper.make_tensor_value_info("label", code, ["N"]), info("scores", ["N", None])]


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_classifier_is_one_graph_and_decides_as_it_was_fitted(kernel: str, classes: int) -> None:
    found, attrs = fit_svc(kernel, classes)
    labels = [10 + i for i in range(classes)]
    m = machine("SVMClassifier", label_and_scores(), classlabels_ints=labels, **attrs)
    assert m.whole
    x = RNG.standard_normal((40, 6)).astype("float32")
    got = m.run([x])
    assert np.array_equal(got["label"], found.predict(x) + 10)
    found.decision_function_shape = "ovo"
    want = found.decision_function(x)
    want = np.stack([want, -want], 1) if classes == 2 else want
    np.testing.assert_allclose(got["scores"], want, 1e-4, 1e-4)


def test_labels_that_are_strings_follow_the_same_graph() -> None:
    found, attrs = fit_svc("rbf", 2)
    outputs = label_and_scores(TensorProto.STRING)
    m = machine("SVMClassifier", outputs, classlabels_strings=["no", "yes"], **attrs)
    x = RNG.standard_normal((40, 6)).astype("float32")
    assert m.run([x])["label"].tolist() == [["no", "yes"][i] for i in found.predict(x)]


def test_probabilities_agree_with_those_of_pairs() -> None:
    """Those of classes settle where each is the mean of what its pairs make of the others."""
    classes = 4
    _, attrs = fit_svc("rbf", classes)
    count = classes * (classes - 1) // 2
    chances = {"prob_a": [-1.5] * count, "prob_b": [0.1] * count}
    labels = list(range(classes))
    plain = machine("SVMClassifier", label_and_scores(), classlabels_ints=labels, **attrs)
    m = machine("SVMClassifier", label_and_scores(), classlabels_ints=labels, **attrs, **chances)
    x = RNG.standard_normal((40, 6)).astype("float32")
    p, scores = m.run([x])["scores"], plain.run([x])["scores"]
    np.testing.assert_allclose(p.sum(1), 1, 1e-5)
    pair = 1 / (1 + np.exp(-1.5 * scores + 0.1))
    q = np.zeros((len(x), classes, classes))
    for column, (i, j) in enumerate(combinations(range(classes), 2)):
        r = np.clip(pair[:, column], 1e-7, 1 - 1e-7)
        q[:, i, i] += (1 - r) ** 2
        q[:, j, j] += r**2
        q[:, i, j] = q[:, j, i] = -r * (1 - r)
    gaps = np.einsum("nij,nj->ni", q, p) - np.einsum("ni,nij,nj->n", p, q, p)[:, None]
    assert np.abs(gaps).max() < 0.005 / classes + 1e-5


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_regressor_gives_what_was_fitted(kernel: str) -> None:
    x = RNG.standard_normal((60, 6)).astype("float32")
    found = svm.SVR(kernel=kernel, gamma=0.1, coef0=0.5, degree=3).fit(x, x[:, 0] + x[:, 1] ** 2)
    attrs = {
        "kernel_type": kernel.upper(),
        "kernel_params": [0.1, 0.5, 3.0],
        "n_supports": len(found.support_),
        "support_vectors": found.support_vectors_.ravel().tolist(),
        "coefficients": found.dual_coef_.ravel().tolist(),
        "rho": found.intercept_.tolist(),
    }
    m = machine("SVMRegressor", [info("y", ["N", 1])], **attrs)
    assert m.whole
    np.testing.assert_allclose(m.run([x])["y"][:, 0], found.predict(x), 1e-4, 1e-4)
    sides = machine("SVMRegressor", [info("y", ["N", 1])], one_class=1, **attrs).run([x])["y"][:, 0]
    assert np.array_equal(sides, np.where(found.predict(x) > 0, 1, -1))


def test_distances_of_rows_far_from_zero_are_exact() -> None:
    near = np.full((1, 6), 1000.0)
    m = machine(
        "SVMRegressor", [info("y", ["N", 1])], kernel_type="RBF", kernel_params=[1.0, 0.0, 0.0],
        n_supports=1, support_vectors=near.ravel().tolist(), coefficients=[1.0], rho=[0.0],
    )  # fmt: skip
    x = (near + np.eye(6)[:1] * 0.5).astype("float32")
    np.testing.assert_allclose(m.run([x])["y"], np.exp(-0.25), 1e-6)


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(UnsupportedOnnxError, match="LINEAR, POLY, RBF or SIGMOID"):
        machine(
            "SVMRegressor", [info("y", ["N", 1])], kernel_type="OWN", n_supports=1,
            support_vectors=[0.0] * 6, coefficients=[1.0], rho=[0.0],
        )  # fmt: skip
