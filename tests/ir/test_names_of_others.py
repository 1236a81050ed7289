"""Names that people type who know torch, Keras, JAX and optax: each answer names a replacement."""

from __future__ import annotations

import numpy as np
import pytest

import graphflow as gf

GIVEN = {
    "gf": gf, "x": gf.placeholder("float32", (None, 4)), "model": gf.nn.Linear(4, 2),
    "opt": gf.optim.SGD(0.1), "w": gf.variable(np.ones(3, "float32"), name="w"),
}  # fmt: skip
TYPED = {
    "gf.tensor([1.0])": r"gf\.constant\(value\)", "gf.array([1])": "gf.constant",
    "x.to('cuda')": r"for a place.*gf\.device.*astype", "x.cuda()": "gf.device",
    "x.numpy()": "Session.run", "x.item()": "Session.run", "x.detach()": "stop_gradient",
    "x.view(2, 2)": "reshape", "x.unsqueeze(0)": "expand_dims", "x.contiguous()": "never changes",
    "x.backward()": r"minimize\(loss\), or gf.gradients", "w.grad": "gf.gradients",
    "x.add_(1)": "gf.assign", "gf.nn.Module": "gf.nn.Layer", "gf.Module": "gf.nn.Layer",
    "gf.nn.Parameter": "gf.variable", "gf.nn.functional": "gf.nn itself",
    "gf.nn.ModuleList": "a list", "gf.nn.ModuleDict": "a dict",
    "gf.nn.CrossEntropyLoss()": "gf.nn.cross_entropy", "gf.nn.MSELoss()": "gf.nn.mse_loss",
    "gf.nn.Dense(4)": "gf.nn.Linear", "gf.nn.Conv2D(1, 2, 3)": "Conv2d",
    "gf.nn.MultiheadAttention(4, 2)": "MultiHeadAttention",
    "gf.nn.utils": "clip_by_global_norm",
    "gf.optim.Adam(model.parameters(), lr=0.1)": r"minimize\(loss, variables\)",
    "opt.step()": "minimize", "opt.zero_grad()": "minimize", "opt.apply_gradients([])": "minimize",
    "gf.optim.lr_scheduler": "gf.optim.schedules", "gf.optim.adam(0.1)": "Adam",
    "gf.optim.chain": "transform=", "gf.utils": "gf.data.arrays",
    "gf.data.DataLoader": "gf.data.arrays", "gf.data.TensorDataset": "gf.data.arrays",
    "gf.no_grad()": "not needed", "gf.manual_seed(0)": "gf.random.seed",
    "gf.save(1)": r"model\.save\(s, path\)", "gf.load(1)": r"model\.load\(s, path\)",
    "gf.cuda": "gf.device", "gf.distributed": "gf.parallel.Data", "gf.grad(1)": "gf.gradients",
    "gf.value_and_grad(1)": "gf.gradients", "gf.jit(1)": "gf.Session", "gf.pmap": "parallel.Data",
    "gf.numpy": "gf itself", "gf.lax.scan": "gf itself", "gf.tree_map": r"model\.parameters",
    "gf.GradientTape()": "gf.gradients", "gf.keras.layers.Dense(3)": "gf.nn",
    "gf.Variable(1.0)": "gf.variable", "gf.optax.adam": "gf.optim", "gf.callbacks": "gf.training",
    "gf.random.PRNGKey(0)": "gf.random.seed", "gf.random.key(0)": "gf.random.seed",
    "gf.training.ModelCheckpoint": "checkpoint=folder", "gf.metrics.Accuracy()": "accuracy",
    "model.train()": r"gf\.nn\.training", "model.eval()": r"gf\.nn\.training",
    "model.to('cuda')": "gf.Session", "model.state_dict()": r"model\.state\(session\)",
    "model.load_state_dict({})": r"model\.load\(session", "model.forward(x)": r"model\(x\)",
    "model.named_parameters()": r"model\.parameters\(\)", "model.compile()": "gf.fit",
    "model.fit(x)": "gf.fit", "model.predict(x)": r"session\.run", "model.add(x)": "Sequential",
    "model.evaluate(x)": r"gf\.metrics\.evaluate", "model.zero_grad()": "not needed",
    "model.get_weights()": r"model\.state", "model.load_weights('a')": r"model\.load",
    "model.apply(x)": r"model\(x\)", "model.init(x)": "a session makes their values",
    "gf.nn.Sequential([model, model])": r"Sequential\(\*layers\)", "model.wieght": "weight",
    "gf.summary": r"model\.summary",
}  # fmt: skip


@pytest.mark.parametrize("typed", TYPED)
def test_a_name_of_another_library_is_answered(typed: str) -> None:
    with pytest.raises((AttributeError, gf.errors.GraphflowError), match=TYPED[typed]):
        eval(typed, dict(GIVEN))  # noqa: S307 - what people type
