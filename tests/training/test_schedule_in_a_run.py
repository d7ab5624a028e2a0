"""Check the parameters of a finished run against a float64 numpy optimiser with every `config.optim` setting.

Two runs use eight devices. A run with learning rate 0 gives the initial parameters. A run of five steps has a distinct
value for each setting; numpy repeats its updates from the gradients of `Model.logits`.
"""

import base64
import dataclasses
import importlib
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.config import Config, from_config_dict
from seqjax.data import open_corpus
from seqjax.nn.params import names
from seqjax.training import evaluate, metrics
from seqjax.training.loop import train
from tests import support

pytestmark = pytest.mark.slow  # a quick version: tests/end_to_end/test_settings.py

STEPS, LR, WARMUP, FINAL = 5, 0.02, 2, 0.004
B1, B2, EPS, DECAY, CLIP, PARTS = 0.7, 0.8, 0.01, 0.3, 0.5, 2
OPTIM = {
    "optim.lr": LR, "optim.warmup_steps": WARMUP, "optim.final_lr": FINAL, "optim.b1": B1, "optim.b2": B2,
    "optim.eps": EPS, "optim.weight_decay": DECAY, "optim.clip_norm": CLIP,
}  # fmt: skip


def make_config(blocks_dir: Path, **settings) -> Config:
    changed = support.run_settings(blocks_dir) | {"checkpoint.every": 0, "eval.every": 0, "model.vocab_size": 264}
    changed |= {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
    config = importlib.import_module("configs.transformer_pp").get_config("debug")
    with config.ignore_type():
        config.update_from_flattened_dict(changed | settings)
    return from_config_dict(config)


@pytest.fixture(scope="module")
def runs(blocks_dir, tmp_path_factory) -> tuple[Path, Path]:
    """Return the workdirs of the run at learning rate 0 and of the five steps."""
    folder = tmp_path_factory.mktemp("optimizer")
    constant = make_config(blocks_dir, **{"train.steps": 1, "optim.lr": 0.0})
    trained = make_config(blocks_dir, **{"train.steps": STEPS, "train.accumulate": PARTS}, **OPTIM)
    assert train(constant, folder / "still")
    assert train(trained, folder / "moving")
    return folder / "still", folder / "moving"


def restored(workdir: Path):
    config, model, params, _, _ = evaluate.restore(workdir)
    return config, model, jax.device_get(params)


def training_rows(workdir: Path) -> list[dict]:
    return [row for row in metrics.read(workdir) if "train/grad_norm" in row]


def batches(config: Config):
    corpus = open_corpus(config.data, seq_len=config.train.seq_len, vocab_size=config.model.vocab_size)
    return corpus.train_iterator(batch_size=config.train.batch_size, process_index=0, process_count=1)


def mean_loss(model):
    """Return the mean loss over predicted tokens, from the logits, with its gradient."""

    def loss(params, rows):
        p = jax.nn.log_softmax(model.logits(params, rows[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(p, rows[:, 1:, None], axis=-1))

    return jax.jit(jax.value_and_grad(loss))


def rates() -> list[float]:
    """Return the rate of each step: linear warmup to `LR`, then linear decay towards `FINAL`."""
    fall = STEPS - WARMUP + 1
    return [LR * (s + 1) / WARMUP if s < WARMUP else LR + (FINAL - LR) * (s - WARMUP + 1) / fall for s in range(STEPS)]


def is_matrix(name: str, x: np.ndarray) -> bool:
    """Return whether the array is a projection; the model has no convolutions."""
    return name.startswith("blocks") and x.ndim == 3


def test_zero_learning_rate_logs_initial_loss_and_norms(runs):
    config, model, params = restored(runs[0])
    rows = np.asarray(next(batches(config))["tokens"], np.int32)
    (row,) = training_rows(runs[0])
    expected, gradient = mean_loss(model)(params, rows)
    assert row["train/loss"] == pytest.approx(float(expected), rel=1e-5)
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(gradient)))
    assert row["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    norm = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(params)))
    assert row["train/param_norm"] == pytest.approx(norm, rel=1e-5)


def test_parameters_match_a_numpy_optimiser(runs):
    """The numpy optimiser has clipping, Adam, decoupled decay of matrices, and the step's rate."""
    config, model, _ = restored(runs[1])
    settings = {f"optim.{field.name}" for field in dataclasses.fields(config.optim)}
    # Only runs with ends use the cooldown (tests/end_to_end/test_ends.py). test_muon.py has Muon and a cosine decay.
    elsewhere = {f"optim.{key}" for key in ("cooldown", "name", "adam_lr", "muon_scale", "muon_momentum", "schedule")}
    assert settings - elsewhere == set(OPTIM), "this run must set every optimiser setting"
    start = restored(runs[0])[2]
    data, value_and_grad = batches(config), mean_loss(model)
    params = {name: np.asarray(x, np.float64) for name, x in names(start)}
    tree = jax.tree.structure(start)
    first = {name: np.zeros_like(x) for name, x in params.items()}
    second = {name: np.zeros_like(x) for name, x in params.items()}
    logged = training_rows(runs[1])
    assert len(logged) == STEPS
    for step, (rate, row) in enumerate(zip(rates(), logged, strict=True), start=1):
        rows = np.asarray(next(data)["tokens"], np.int32)
        current = jax.tree.unflatten(tree, [jnp.asarray(x, jnp.float32) for x in params.values()])
        loss, gradient = value_and_grad(current, rows)
        grads = {name: np.asarray(g, np.float64) for name, g in names(gradient)}
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        assert norm > CLIP, "clipping must be active"
        assert row["train/loss"] == pytest.approx(float(loss), rel=1e-4)
        assert row["train/grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert row["train/lr"] == pytest.approx(rate, rel=1e-5)
        for name, g in grads.items():
            g = g * CLIP / norm
            first[name] = B1 * first[name] + (1 - B1) * g
            second[name] = B2 * second[name] + (1 - B2) * g**2
            update = first[name] / (1 - B1**step) / (np.sqrt(second[name] / (1 - B2**step)) + EPS)
            params[name] = params[name] - rate * (update + DECAY * params[name] * is_matrix(name, params[name]))
    final = dict(names(restored(runs[1])[2]))
    for name, x in names(start):
        distance = np.abs(params[name] - x).max()
        assert distance > 1e-4, name
        np.testing.assert_allclose(final[name], params[name], rtol=0, atol=5e-3 * distance, err_msg=name)


def saved_mesh_axes(workdir: Path) -> dict[str, list]:
    """Return the mesh axes of each saved array by path, from Orbax's `_sharding` files."""
    specs = {}
    for path in (workdir / "checkpoints").rglob("_sharding"):
        for key, text in json.loads(path.read_text()).items():
            specs[base64.b64decode(key).decode()] = json.loads(text)["partition_spec"]
    return specs


def test_moments_are_sharded_like_their_parameters(runs):
    """Replicated moments would need twice the memory of unsharded parameters on each device."""
    specs = saved_mesh_axes(runs[1])
    params = [name for name, _ in names(restored(runs[1])[2])]
    assert sum(any(specs[name]) for name in params) > 5, "most parameters must be sharded"
    for name in params:
        moments = [path for path in specs if re.fullmatch(rf".*\.(mu|nu)\.{re.escape(name)}", path)]
        assert len(moments) == 2, name
        assert all(specs[path] == specs[name] for path in moments), name
