"""The pure functions of training: one optimiser step, one evaluation step. Nothing here knows files or loops."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from seqjax.models import Model
from seqjax.models.entropy import mean_entropy
from seqjax.sharding import replicated, shardings
from seqjax.types import Array, Params, PRNGKey


class TrainState(NamedTuple):
    """What a step changes, or the shapes or shardings of that. `rng` is raw key data: every leaf is a plain array."""

    params: Params
    opt_state: Any
    step: Any  # int32 scalar
    rng: Any  # uint32 [2]


def init_state(model: Model, optimizer: optax.GradientTransformation, key: PRNGKey) -> TrainState:
    """Fresh parameters and optimiser state; jit this with output shardings to build them in place."""
    params_key, rng = jax.random.split(key)
    params = model.init(params_key)
    step = jnp.zeros((), jnp.int32)
    return TrainState(params, optimizer.init(params), step, jax.random.key_data(rng))


def state_shardings(
    mesh: Mesh, model: Model, optimizer: optax.GradientTransformation, shapes: TrainState
) -> TrainState:
    """The sharding of every leaf of a state: parameters by their axes, the optimiser's moments as their parameters."""
    by_param, one = shardings(mesh, model.shapes, model.axes), replicated(mesh)
    moments = optax.tree.map_params(
        optimizer, lambda _, s: s, shapes.opt_state, by_param, transform_non_params=lambda _: one
    )
    return TrainState(by_param, moments, one, one)


def make_train_step(
    model: Model, optimizer: optax.GradientTransformation, schedule: optax.Schedule
) -> Callable[[TrainState, Array], tuple[TrainState, dict[str, Array]]]:
    """(state, tokens [A, B, T + 1]) -> (state, metrics): A micro-batches, one update with their mean gradient.

    `schedule` is only reported; the optimiser has its own.
    """

    def micro(params: Params, tokens_BT1: Array) -> tuple[Array, Params]:
        def mean_loss(params: Params) -> Array:
            total, count = model.loss(params, tokens_BT1)
            return total / count

        return jax.value_and_grad(mean_loss)(params)

    def train_step(state: TrainState, tokens_ABT1: Array) -> tuple[TrainState, dict[str, Array]]:
        n_micro = tokens_ABT1.shape[0]
        if n_micro == 1:
            loss, grads = micro(state.params, tokens_ABT1[0])
        else:

            def body(carry, tokens_BT1):
                return jax.tree.map(jnp.add, carry, micro(state.params, tokens_BT1)), None

            zero = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, state.params))
            sums, _ = jax.lax.scan(body, zero, tokens_ABT1)
            loss, grads = jax.tree.map(lambda x: x / n_micro, sums)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params: Any = optax.apply_updates(state.params, updates)
        # the norm of the new parameters too: a finite loss does not say that its update was finite
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "param_norm": optax.tree.norm(params)}
        metrics["lr"] = schedule(state.step)
        return TrainState(params, opt_state, state.step + 1, state.rng), metrics

    return train_step


def jit_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    state: TrainState,
    tokens: NamedSharding,
) -> Any:
    """`make_train_step` under `jax.jit`, for a state and tokens [A, B, T + 1] with these shardings.

    The state that goes in gives its buffers to the one that comes out. Call it inside `jax.set_mesh`.
    """
    return jax.jit(
        make_train_step(model, optimizer, schedule),
        donate_argnums=0,
        in_shardings=(state, tokens),
        out_shardings=(state, replicated(cast(Mesh, tokens.mesh))),
    )


def make_eval_step(model: Model) -> Callable[[Params, Array], Array]:
    """(params, tokens [B, T + 1]) -> summed next-token loss of every row in nats, float32 [B]."""
    return model.sequence_losses


def make_entropy_step(model: Model) -> Callable[[Params, Array, Array], tuple[Array, Array, Array]]:
    """(params, tokens [B, T + 1], weights [B]) -> sums over rows of `mean_entropy`'s two means, and of the weights."""

    def entropy_step(params: Params, tokens_BT1: Array, weights_B: Array) -> tuple[Array, Array, Array]:
        nats_LB, relative_LB = mean_entropy(model, params, tokens_BT1[:, :-1])
        return jnp.mean(nats_LB, 0) @ weights_B, jnp.mean(relative_LB, 0) @ weights_B, jnp.sum(weights_B)

    return entropy_step
