"""The training step of every config lowers for TPU. No TPU has run it: this finds operations without a rule there."""

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import device
from seqjax.config import from_config_dict, presets
from seqjax.models import Model
from seqjax.training import schedule
from seqjax.training.step import init_state, make_train_step
from tests import support


@pytest.mark.parametrize("name", support.slow_unless(lambda name: name == "top1_element", presets.names()))
def test_the_training_step_lowers_for_tpu(name, monkeypatch) -> None:
    """In bfloat16, as it would run there, with the optimiser, at the debug size; backends are chosen as on a TPU."""
    monkeypatch.setattr(device, "platform", lambda: "tpu")
    config = from_config_dict(presets.read_config(f"{name}:debug,model.dtype=bfloat16"))
    model = Model(config.model, max_len=config.train.seq_len)
    optimizer = schedule.optimizer(config.optim)
    state = jax.eval_shape(lambda: init_state(model, optimizer, jax.random.key(0)))
    step = make_train_step(model, optimizer)
    tokens = jax.ShapeDtypeStruct((1, config.train.batch_size, config.train.seq_len + 1), jnp.int32)
    exported = jax.export.export(jax.jit(step), platforms=["tpu"])(state, tokens, jnp.float32(1))
    assert exported.platforms == ("tpu",)
    assert "while" in exported.mlir_module(), "the layers are scanned"
