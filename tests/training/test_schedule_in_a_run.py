"""What `train` does to the parameters, from its workdir alone: every setting of the optimiser, against numpy.

Two runs on eight devices: one that learns nothing, for the parameters it starts from, and one of five steps in which
each setting has a value of its own. Its trajectory is made again in float64 numpy from gradients of `Model.logits`.
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

pytestmark = pytest.mark.slow  # a quick look at the same: tests/end_to_end/test_settings.py

STEPS, LR, WARMUP, FINAL = 5, 0.02, 2, 0.004
B1, B2, EPS, DECAY, CLIP, PARTS = 0.7, 0.8, 0.01, 0.3, 0.5, 2
OPTIM = {
    "optim.lr": LR, "optim.warmup_steps": WARMUP, "optim.final_lr": FINAL, "optim.b1": B1, "optim.b2": B2,
    "optim.eps": EPS, "optim.weight_decay": DECAY, "optim.clip_norm": CLIP,
}  # fmt: skip


def configured(blocks_dir: Path, **settings) -> Config:
    changed = support.run_settings(blocks_dir) | {"checkpoint.every": 0, "eval.every": 0, "model.vocab_size": 264}
    changed |= {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
    config = importlib.import_module("configs.transformer_pp").get_config("debug")
    with config.ignore_type():
        config.update_from_flattened_dict(changed | settings)
    return from_config_dict(config)


@pytest.fixture(scope="module")
def runs(blocks_dir, tmp_path_factory) -> tuple[Path, Path]:
    """The workdirs of a run without learning, and of the five steps."""
    folder = tmp_path_factory.mktemp("optimizer")
    still = configured(blocks_dir, **{"train.steps": 1, "optim.lr": 0.0})
    moving = configured(blocks_dir, **{"train.steps": STEPS, "train.accumulate": PARTS}, **OPTIM)
    assert train(still, folder / "still")
    assert train(moving, folder / "moving")
    return folder / "still", folder / "moving"


def restored(workdir: Path):
    config, model, params, _, _ = evaluate.restore(workdir)
    return config, model, jax.device_get(params)


def steps(workdir: Path) -> list[dict]:
    return [row for row in metrics.read(workdir) if "train/grad_norm" in row]


def batches(config: Config):
    corpus = open_corpus(config.data, seq_len=config.train.seq_len, vocab_size=config.model.vocab_size)
    return corpus.train_iterator(batch_size=config.train.batch_size, process_index=0, process_count=1)


def mean_loss(model):
    """Over the predicted tokens, from the logits."""

    def loss(params, rows):
        p = jax.nn.log_softmax(model.logits(params, rows[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(p, rows[:, 1:, None], axis=-1))

    return jax.jit(jax.value_and_grad(loss))


def rates() -> list[float]:
    """Up to `lr` over the warm-up, then down to what step number `STEPS` would have."""
    fall = STEPS - WARMUP + 1
    return [LR * (s + 1) / WARMUP if s < WARMUP else LR + (FINAL - LR) * (s - WARMUP + 1) / fall for s in range(STEPS)]


def is_matrix(name: str, x: np.ndarray) -> bool:
    """The model has no convolutions, so these are its projections."""
    return name.startswith("blocks") and x.ndim == 3


def test_a_learning_rate_of_zero_moves_nothing_and_the_first_loss_is_that_of_the_start(runs):
    config, model, params = restored(runs[0])
    rows = np.asarray(next(batches(config))["tokens"], np.int32)
    (row,) = steps(runs[0])
    want, gradient = mean_loss(model)(params, rows)
    assert row["train/loss"] == pytest.approx(float(want), rel=1e-5)
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(gradient)))
    assert row["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    norm = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(params)))
    assert row["train/param_norm"] == pytest.approx(norm, rel=1e-5)


def test_the_parameters_of_a_run_are_those_of_numpy(runs):
    """Global-norm clipping, Adam with bias correction, decoupled decay of matrices, the rate of the step."""
    config, model, _ = restored(runs[1])
    every = {f"optim.{field.name}" for field in dataclasses.fields(config.optim)}
    # The cooldown is of runs with ends (tests/end_to_end/test_ends.py).
    assert every - {"optim.cooldown"} == set(OPTIM), "a setting of the optimiser that this run leaves at its default"
    start = restored(runs[0])[2]
    data, value_and_grad = batches(config), mean_loss(model)
    params = {name: np.asarray(x, np.float64) for name, x in names(start)}
    tree = jax.tree.structure(start)
    first = {name: np.zeros_like(x) for name, x in params.items()}
    second = {name: np.zeros_like(x) for name, x in params.items()}
    logged = steps(runs[1])
    assert len(logged) == STEPS
    for step, (rate, row) in enumerate(zip(rates(), logged, strict=True), start=1):
        rows = np.asarray(next(data)["tokens"], np.int32)
        now = jax.tree.unflatten(tree, [jnp.asarray(x, jnp.float32) for x in params.values()])
        loss, gradient = value_and_grad(now, rows)
        grads = {name: np.asarray(g, np.float64) for name, g in names(gradient)}
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        assert norm > CLIP, "nothing to clip"
        assert row["train/loss"] == pytest.approx(float(loss), rel=1e-4)
        assert row["train/grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert row["train/lr"] == pytest.approx(rate, rel=1e-5)
        for name, g in grads.items():
            g = g * CLIP / norm
            first[name] = B1 * first[name] + (1 - B1) * g
            second[name] = B2 * second[name] + (1 - B2) * g**2
            update = first[name] / (1 - B1**step) / (np.sqrt(second[name] / (1 - B2**step)) + EPS)
            params[name] = params[name] - rate * (update + DECAY * params[name] * is_matrix(name, params[name]))
    got = dict(names(restored(runs[1])[2]))
    for name, x in names(start):
        moved = np.abs(params[name] - x).max()
        assert moved > 1e-4, name
        np.testing.assert_allclose(got[name], params[name], rtol=0, atol=5e-3 * moved, err_msg=name)


def placed(workdir: Path) -> dict[str, list]:
    """The mesh axes of every array that was saved, by its path: Orbax writes down where each came from."""
    specs = {}
    for path in (workdir / "checkpoints").rglob("_sharding"):
        for key, text in json.loads(path.read_text()).items():
            specs[base64.b64decode(key).decode()] = json.loads(text)["partition_spec"]
    return specs


def test_the_moments_are_split_as_their_parameters(runs):
    """Copies on every device would cost twice the parameters again, where fsdp is there to split them."""
    specs = placed(runs[1])
    params = [name for name, _ in names(restored(runs[1])[2])]
    assert sum(any(specs[name]) for name in params) > 5, "hardly a parameter is split"
    for name in params:
        moments = [path for path in specs if re.fullmatch(rf".*\.(mu|nu)\.{re.escape(name)}", path)]
        assert len(moments) == 2, name
        assert all(specs[path] == specs[name] for path in moments), name
