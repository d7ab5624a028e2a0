"""The pure functions of training: initialisation, the optimiser step and the evaluation steps."""

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
    """The training state, or its shapes or shardings. `rng` is raw key data, so that every leaf is a plain array."""

    params: Params
    opt_state: Any
    step: Any  # int32 scalar
    rng: Any  # uint32 [2]


def init_state(model: Model, optimizer: optax.GradientTransformation, key: PRNGKey) -> TrainState:
    """Return a fresh training state; jit this with output shardings to create it in place on the devices."""
    params_key, rng = jax.random.split(key)
    params = model.init(params_key)
    step = jnp.zeros((), jnp.int32)
    return TrainState(params, optimizer.init(params), step, jax.random.key_data(rng))


def state_shardings(
    mesh: Mesh, model: Model, optimizer: optax.GradientTransformation, shapes: TrainState
) -> TrainState:
    """Return the sharding of every leaf of the state; the optimiser's moments are sharded like their parameters."""
    by_param, unsharded = shardings(mesh, model.shapes, model.axes), replicated(mesh)
    moments = optax.tree.map_params(
        optimizer, lambda _, s: s, shapes.opt_state, by_param, transform_non_params=lambda _: unsharded
    )
    return TrainState(by_param, moments, unsharded, unsharded)


def make_train_step(
    model: Model, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Array, Any], tuple[TrainState, dict[str, Array]]]:
    """Return (state, tokens int32 [A, B, T + 1], rate float32 []) -> (state, metrics), one update of the parameters.

    The update is that of `optimizer` for the mean gradient of A micro-batches, times the learning rate `rate`.
    `metrics` holds scalars: the loss in nats per token, the global norms of the gradient and of the new parameters, and
    the learning rate.
    """

    def loss_and_grads(params: Params, tokens_BT1: Array) -> tuple[Array, Params]:
        def mean_loss(params: Params) -> Array:
            total, count = model.loss(params, tokens_BT1)
            return total / count

        return jax.value_and_grad(mean_loss)(params)

    def train_step(state: TrainState, tokens_ABT1: Array, rate: Any) -> tuple[TrainState, dict[str, Array]]:
        n_micro = tokens_ABT1.shape[0]
        if n_micro == 1:
            loss, grads = loss_and_grads(state.params, tokens_ABT1[0])
        else:

            def body(carry, tokens_BT1):
                return jax.tree.map(jnp.add, carry, loss_and_grads(state.params, tokens_BT1)), None

            zero = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, state.params))
            sums, _ = jax.lax.scan(body, zero, tokens_ABT1)
            loss, grads = jax.tree.map(lambda x: x / n_micro, sums)
        with jax.named_scope("optimizer"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            updates = jax.tree.map(lambda u: u * jnp.asarray(rate, u.dtype), updates)
            params: Any = optax.apply_updates(state.params, updates)
        # The parameter norm is that after the update, because a finite loss does not imply a finite update.
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "param_norm": optax.tree.norm(params)}
        metrics["lr"] = jnp.asarray(rate, jnp.float32)
        return TrainState(params, opt_state, state.step + 1, state.rng), metrics

    return train_step


def jit_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    *,
    state: TrainState,
    tokens: NamedSharding,
) -> Any:
    """Return `make_train_step` under `jax.jit`, for a state and tokens int32 [A, B, T + 1] with these shardings.

    The rate is replicated. The buffers of the input state are donated to the output state. Call it inside
    `jax.set_mesh`.
    """
    unsharded = replicated(cast(Mesh, tokens.mesh))
    return jax.jit(
        make_train_step(model, optimizer),
        donate_argnums=0,
        in_shardings=(state, tokens, unsharded),
        out_shardings=(state, unsharded),
    )


def make_eval_step(model: Model) -> Callable[[Params, Array], Array]:
    """Return (params, tokens int32 [B, T + 1]) -> summed next-token loss of every row in nats, float32 [B]."""
    return model.sequence_losses


def make_token_step(model: Model) -> Callable[[Params, Array], Array]:
    """Return (params, tokens int32 [B, T + 1]) -> next-token loss of every token in nats, float32 [B, T]."""
    return model.token_losses


def make_entropy_step(model: Model) -> Callable[[Params, Array, Array], tuple[Array, Array, Array]]:
    """Return (params, tokens [B, T + 1], weights [B]) -> weighted row sums of `mean_entropy`'s two values, and of 1."""

    def entropy_step(params: Params, tokens_BT1: Array, weights_B: Array) -> tuple[Array, Array, Array]:
        nats_LB, relative_LB = mean_entropy(model, params, tokens_BT1[:, :-1])
        return jnp.mean(nats_LB, 0) @ weights_B, jnp.mean(relative_LB, 0) @ weights_B, jnp.sum(weights_B)

    return entropy_step
