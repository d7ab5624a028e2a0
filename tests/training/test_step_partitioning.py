"""XLA's partitioning of training and evaluation steps on a data x fsdp x tensor mesh."""

import math
import uuid
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from seqjax import mixers, testing
from seqjax.errors import UserError
from seqjax.mixers import _registry, base
from seqjax.models import Model, flops
from seqjax.models.entropy import require_entropy
from seqjax.nn import param
from seqjax.sharding import batch_sharding, make_mesh, replicated, shardings
from seqjax.training.schedule import optimizer as make_optimizer
from seqjax.training.step import init_state, make_entropy_step, make_train_step, state_shardings
from tests import support
from tests.kernels.test_scans_on_meshes import collectives

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="needs eight devices (XLA_FLAGS sets another number)")

# XLA's warning if it can only replicate an array on all devices and split it again
WARNING = "Involuntary full rematerialization"


def compile_and_listen(f: Callable, arguments: Any, capfd: pytest.CaptureFixture, **options: Any) -> tuple[Any, str]:
    """Compile a function; return the program and XLA's output on file descriptor 2."""
    f_named = lambda *args: f(*args)  # noqa: E731
    f_named.__name__ = f"step_{uuid.uuid4().hex}"  # a new name avoids the compilation cache
    capfd.readouterr()
    compiled = jax.jit(f_named, **options).lower(*arguments).compile()
    return compiled, capfd.readouterr().err


def mesh_of_eight() -> jax.sharding.Mesh:
    return make_mesh(data=2, fsdp=2, tensor=2)


def test_capture_includes_the_warning(capfd) -> None:
    """Columns split over `fsdp` become rows split over `data` and `fsdp`."""
    mesh = mesh_of_eight()

    def f(x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, jax.P(None, "fsdp")))
        return jax.lax.with_sharding_constraint(2 * x, batch_sharding(mesh))

    _, output = compile_and_listen(f, [jax.ShapeDtypeStruct((8, 16, 8), jnp.float32)], capfd)
    assert WARNING in output


@pytest.mark.parametrize(
    ("mixer", "variant"), support.slow_unless(lambda mixer, _: mixer == "transformer_pp", support.FIRST)
)
def test_training_step_replicates_no_array(mixer, variant, capfd) -> None:
    config = support.tiny(mixer, variant, train__batch_size=8)
    model, mesh = Model(config.model, max_len=config.train.seq_len), mesh_of_eight()
    optimizer = make_optimizer(config.optim)
    shapes = jax.eval_shape(lambda: init_state(model, optimizer, jax.random.key(0)))
    state = state_shardings(mesh, model, optimizer, shapes)
    tokens = jax.ShapeDtypeStruct((2, 4, config.train.seq_len + 1), jnp.int32)
    with jax.set_mesh(mesh):
        _, output = compile_and_listen(
            make_train_step(model, optimizer),
            (shapes, tokens, jax.ShapeDtypeStruct((), jnp.float32)),
            capfd,
            in_shardings=(state, batch_sharding(mesh, leading=1), replicated(mesh)),
            out_shardings=(state, replicated(mesh)),
        )
    assert WARNING not in output, output


@pytest.mark.parametrize(
    ("mixer", "variant", "tied"),
    support.slow_unless(
        lambda mixer, _, tied: (mixer, tied) in (("top1_chunk", True), ("mamba2", False)),
        [(*case, tied) for case in support.FIRST for tied in (True, False)],
    ),
)
def test_each_gradient_is_reduced_once(mixer, variant, tied) -> None:
    """A tied embedding has two gradient terms, but one sum over data-parallel devices."""
    model = support.tiny_model(mixer, variant, model__scan_layers=False, model__tie_embeddings=tied)
    mesh = make_mesh(data=4, devices=jax.devices()[:4])
    params, tokens = shardings(mesh, model.shapes, model.axes), jax.ShapeDtypeStruct((8, 24), jnp.int32)
    gradient = jax.jit(
        jax.grad(lambda p, t: testing.objective(model, p, t)),
        in_shardings=(params, batch_sharding(mesh)),
        out_shardings=params,
    )
    with jax.set_mesh(mesh):
        program = str(gradient.lower(model.shapes, tokens).compile().as_text())
    collectives_by_kind = collectives(program)
    assert set(collectives_by_kind) == {"all-reduce"}
    assert sum(math.prod(shape) for shape in collectives_by_kind["all-reduce"]) == flops.n_params(model)


@pytest.mark.parametrize(
    ("mixer", "variant"), support.slow_unless(lambda mixer, _: mixer == "top1_chunk", support.FIRST)
)
def test_evaluation_replicates_no_array(mixer, variant, capfd) -> None:
    """Both evaluation programs: sequence losses, and attention entropy if the mixer has softmax weights."""
    model, mesh = support.tiny_model(mixer, variant), mesh_of_eight()
    params = shardings(mesh, model.shapes, model.axes)
    tokens, weights = jax.ShapeDtypeStruct((8, 24), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.float32)
    with jax.set_mesh(mesh):
        options = {"in_shardings": (params, batch_sharding(mesh)), "out_shardings": replicated(mesh)}
        _, output = compile_and_listen(model.sequence_losses, (model.shapes, tokens), capfd, **options)
        assert WARNING not in output, output
        if lacks_entropy(model):
            return
        options["in_shardings"] = (*options["in_shardings"], batch_sharding(mesh))
        _, output = compile_and_listen(make_entropy_step(model), (model.shapes, tokens, weights), capfd, **options)
    assert WARNING not in output, output


def lacks_entropy(model: Model) -> bool:
    try:
        require_entropy(model)
    except UserError:
        return True
    return False


class OneMatrix(base.Mixer):
    """y_t = x_t W; the output width stays split over `heads`."""

    def __init__(self, dim, *, rngs):
        self.w = param(rngs, jax.nn.initializers.normal(0.02), (dim, dim), ("embed", "heads"))

    def __call__(self, x_BTD):
        return x_BTD @ self.w[...].astype(x_BTD.dtype)

    def init_cache(self, batch, max_len, dtype):
        return {}

    def step(self, x_BD, cache):
        return self(x_BD), cache


def test_gradients_with_a_sharded_mixer_output(monkeypatch) -> None:
    """XLA's partitioner computes wrong products unless arrays between block parts are split only by batch."""
    monkeypatch.setattr(_registry, "_registered", {})
    mixers.register("one_matrix")(OneMatrix)
    assert testing.check_mixer(OneMatrix, skip=set(testing.CHECKS) - {"sharding"}) == ["sharding"]
