"""Provide one run in which every setting differs from its default, so tests can check each setting's effect."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest

from seqjax.config import Config
from seqjax.models import Model
from seqjax.training import workdir as workdirs
from seqjax.training.checkpoint import Checkpoints
from seqjax.training.loop import train
from tests import support

STEPS = 6
SETTINGS = {
    "model__learned_positions": True,
    "train__steps": STEPS,
    "train__seed": 5,
    "train__batch_size": 16,
    "train__accumulate": 2,
    "data__seed": 3,
    "optim__lr": 0.05,
    "optim__b1": 0.6,
    "optim__b2": 0.7,
    "optim__eps": 1e-3,
    "optim__weight_decay": 0.6,
    "optim__clip_norm": 0.4,
    "optim__warmup_steps": 3,
    "optim__final_lr": 0.02,
    "eval__every": 0,
    "eval__tokens": 11 * support.SEQ_LEN,
    "eval__batch_size": 12,
    "eval__seed": 4,
    "eval__entropy_tokens": 5 * support.SEQ_LEN,
    "checkpoint__every": 0,
    "mesh__data": 2,
    "mesh__fsdp": 2,
    "mesh__tensor": 2,
    "log__profile_start": 3,
    "log__profile_steps": 2,
    "log__sample_tokens": 9,
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run, with records of what it did."""

    workdir: Path
    config: Config
    batch_shapes: list[tuple[str, tuple[int, ...]]]  # (train | eval, shape) of the tokens of each loss
    profile: list[tuple[str, int]]  # (start | stop, complete steps at that time)
    saved: dict[str, Any]  # path -> array of the last checkpoint


@pytest.fixture(scope="session")
def config(blocks_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return attention with a low temperature and learned positions: its outputs differ clearly between tokens."""
    test_set = support.write_blocks(tmp_path_factory.mktemp("sets") / "other", seed=7)
    return support.run_config(blocks_dir, "ablations.temperature", eval__path=(str(test_set),), **SETTINGS)


@pytest.fixture(scope="session")
def run(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train on eight devices as 2 x 2 x 2, recording the events of JAX's profiler and Orbax."""
    workdir = tmp_path_factory.mktemp("end_to_end") / "run"
    run = Run(workdir, config, [], [], {})
    loss, block_losses, save = Model.training_loss, Model.weighted_sequence_losses, ocp.CheckpointManager.save

    def seen_loss(self, params, inputs_BT, targets_BT):
        run.batch_shapes.append(("train", (inputs_BT.shape[0], inputs_BT.shape[1] + 1)))
        return loss(self, params, inputs_BT, targets_BT)

    def seen_block_losses(self, params, tokens_BT1, weights_BT):
        run.batch_shapes.append(("eval", tokens_BT1.shape))
        return block_losses(self, params, tokens_BT1, weights_BT)

    def seen_save(self, step, *, args, **options):
        items = {name: getattr(item, "item", None) for name, item in args.items()}
        run.saved.clear()
        for path, x in jax.tree_util.tree_leaves_with_path(items):
            if isinstance(x, jax.Array):
                run.saved[jax.tree_util.keystr(path)] = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        return save(self, step, args=args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "training_loss", seen_loss)
        patch.setattr(Model, "weighted_sequence_losses", seen_block_losses)
        patch.setattr(ocp.CheckpointManager, "save", seen_save)
        patch.setattr(
            jax.profiler, "start_trace", lambda *a, **k: run.profile.append(("start", support.n_rows(workdir)))
        )
        patch.setattr(jax.profiler, "stop_trace", lambda: run.profile.append(("stop", support.n_rows(workdir))))
        assert train(config, workdir) is True
    return run


def write_checkpoint(workdir: Path, config: Config, step: int) -> Run:
    """Write a workdir with random parameters as large as trained ones, so every input gives different tokens."""
    workdirs.save_config(workdir, config)
    checkpoints = Checkpoints(workdir)
    model = Model(config.model, max_len=config.train.seq_len)
    checkpoints.save_params(step, support.random_params(model))
    checkpoints.wait()
    checkpoints.close()
    return Run(workdir, config, [], [], {})


@pytest.fixture(scope="session")
def rough(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Write the model of `run` with random parameters."""
    return write_checkpoint(tmp_path_factory.mktemp("rough") / "run", config, 7)
