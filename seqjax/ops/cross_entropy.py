"""Next-token cross-entropy from hidden states, without the whole batch's logits.

    L = sum_i w_i (logsumexp_o(h_i W_o) - h_i W_{y_i}), in nats

At T = 102,400 and a vocabulary of 32,000 the float32 logits would take 13 GB, so tokens are processed in chunks of
`chunk`. The loss is a scalar, so its gradient is linear in the incoming cotangent. The forward pass computes dL/dh and
dL/dW of each chunk while its logits exist, and the backward pass only scales them. This takes three matrix products
instead of the four with recomputation. `kernels_pallas.cross_entropy` turns a chunk's logits into losses and the
logits' gradient.

With tokens sharded along B, T or both, each device processes `chunk` tokens at a time and accumulates its dL/dW. Every
device's dL/dW is the gradient of a separate copy of W (`seqjax.sharding.copies`); the copies' gradients are summed
once, after all chunks.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

import kernels_pallas
from seqjax.sharding import (
    constrain_pieces,
    copies,
    rows_to_time,
    splits_vocabulary,
    time_pieces,
    time_to_rows,
    token_pieces,
)
from seqjax.types import Array


def cross_entropy(
    h_BTD: Float[Array, "B T D"],
    w_DO: Float[Array, "D O"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    chunk: int = 4096,
    table_NOD: Float[Array, "N O D"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, ""]:
    """Return the weighted sum of token losses in nats, float32 [].

    `chunk` limits the number of tokens with logits in memory per device (at least one per row). The loss is
    differentiable in `h_BTD` and `w_DO`. If `w_DO` is the transpose of a table with another use, it is differentiable
    in the copies `table_NOD` instead (`seqjax.ops.lookup.table_copies`). Logits are computed in the dtype of `h_BTD`
    with float32 accumulation. `implementation` is as in `kernels_pallas`.
    """
    pieces = token_pieces(h_BTD)
    copies_NDO = copies(w_DO, pieces) if table_NOD is None else jnp.swapaxes(table_NOD, 1, 2)
    h_RTD, targets_RT, weights_RT = (time_to_rows(x) for x in (h_BTD, targets_BT, weights_BT))
    w_DO = jax.lax.stop_gradient(w_DO)
    return _cross_entropy(h_RTD, w_DO, copies_NDO, targets_RT, weights_RT, chunk * pieces, implementation)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _cross_entropy(
    h_BTD: Array,
    w_DO: Array,
    copies_NDO: Array,
    targets_BT: Array,
    weights_BT: Array,
    chunk: int,
    implementation: str | None,
) -> Array:
    del copies_NDO
    w_DO = w_DO.astype(h_BTD.dtype)

    def body(loss_B, xs):
        return loss_B + _losses_and_gradient(w_DO, *xs, implementation=implementation)[0], None

    init_B = jnp.zeros(h_BTD.shape[0], jnp.float32)
    return jnp.sum(jax.lax.scan(body, init_B, _time_chunks(h_BTD, targets_BT, weights_BT, chunk=chunk))[0])


def sequence_losses(
    h_BTD: Float[Array, "B T D"], w_DO: Float[Array, "D O"], targets_BT: Int[Array, "B T"], chunk: int = 4096
) -> Float[Array, "B"]:
    """Return each sequence's summed token losses in nats, float32 [B].

    Chunks are as in `cross_entropy`.
    """
    return _sequence_sums(h_BTD, w_DO, targets_BT, (jnp.ones(targets_BT.shape, jnp.float32),), chunk)[0]


def weighted_sequence_losses(
    h_BTD: Float[Array, "B T D"],
    w_DO: Float[Array, "D O"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    chunk: int = 4096,
) -> tuple[Float[Array, "B"], Float[Array, "B"]]:
    """Return `sequence_losses` and the weighted sums, from the same logits."""
    ones_BT = jnp.ones(targets_BT.shape, jnp.float32)
    losses_B, weighted_B = _sequence_sums(h_BTD, w_DO, targets_BT, (ones_BT, weights_BT), chunk)
    return losses_B, weighted_B


def _sequence_sums(
    h_BTD: Array, w_DO: Array, targets_BT: Array, weights: tuple[Array, ...], chunk: int
) -> tuple[Array, ...]:
    """Return each sequence's summed losses [B], for each of the weights [B, T]."""
    n_batch, n_pieces, chunk = h_BTD.shape[0], time_pieces(h_BTD), chunk * token_pieces(h_BTD)
    h_BTD, targets_BT, *weights_BT = (time_to_rows(x) for x in (h_BTD, targets_BT, *weights))
    w_DO = w_DO.astype(h_BTD.dtype)

    def body(sums, xs):
        h_BCD, y_BC, *weights_BC = xs
        _, lse_BC, target_logit_BC = _logits(w_DO, h_BCD, y_BC)
        losses_BC = lse_BC - target_logit_BC
        return tuple(x_B + jnp.sum(x_BC * losses_BC, axis=1) for x_B, x_BC in zip(sums, weights_BC, strict=True)), None

    init = (jnp.zeros(h_BTD.shape[0], jnp.float32),) * len(weights)
    sums = jax.lax.scan(body, init, _time_chunks(h_BTD, targets_BT, *weights_BT, chunk=chunk))[0]
    return sums if n_pieces == 1 else tuple(x_B.reshape(n_pieces, n_batch).sum(0) for x_B in sums)


def token_losses(
    h_BTD: Float[Array, "B T D"], w_DO: Float[Array, "D O"], targets_BT: Int[Array, "B T"], chunk: int = 4096
) -> Float[Array, "B T"]:
    """Return the token losses in nats, float32 [B, T].

    Chunks are as in `cross_entropy`.
    """
    n_sequences, chunk = h_BTD.shape[0], chunk * token_pieces(h_BTD)
    h_BTD, targets_BT = time_to_rows(h_BTD), time_to_rows(targets_BT)
    w_DO = w_DO.astype(h_BTD.dtype)

    def body(carry, xs):
        _, lse_BC, target_logit_BC = _logits(w_DO, *xs[:2])
        return carry, lse_BC - target_logit_BC

    ones_BT = jnp.ones(targets_BT.shape, jnp.float32)
    losses_cBC = jax.lax.scan(body, None, _time_chunks(h_BTD, targets_BT, ones_BT, chunk=chunk))[1]
    n_batch, seq_len = targets_BT.shape
    return rows_to_time(jnp.moveaxis(losses_cBC, 0, 1).reshape(n_batch, -1)[:, :seq_len], n_sequences)


def marked_scores(
    h_BTD: Float[Array, "B T D"],
    w_DO: Float[Array, "D O"],
    targets_BT: Int[Array, "B T"],
    marks_BT: Float[Array, "B T"],
    chunk: int = 4096,
) -> tuple[Float[Array, "B"], Float[Array, "B"]]:
    """Return each sequence's marked log-probability and number of marked misses.

    The log-probability of the marked targets is in nats; a miss is a target that is not the most likely token. Marks
    are 0 or 1, and both results float32 [B]. A time chunk without a mark computes no logits, which makes a short
    continuation of a long context cheap.
    """
    n_batch, n_pieces, chunk = h_BTD.shape[0], time_pieces(h_BTD), chunk * token_pieces(h_BTD)
    h_BTD, targets_BT, marks_BT = (time_to_rows(x) for x in (h_BTD, targets_BT, marks_BT))
    w_DO = w_DO.astype(h_BTD.dtype)

    def scored(xs):
        h_BCD, y_BC, mark_BC = xs
        logits_BCO, lse_BC, target_logit_BC = _logits(w_DO, h_BCD, y_BC)
        missed_BC = (jnp.argmax(logits_BCO, axis=-1) != y_BC).astype(jnp.float32)
        return jnp.sum(mark_BC * (target_logit_BC - lse_BC), axis=1), jnp.sum(mark_BC * missed_BC, axis=1)

    def body(sums, xs):
        zeros = jax.tree.map(jnp.zeros_like, sums)
        more = jax.lax.cond(jnp.any(xs[2] > 0), scored, lambda xs: zeros, xs)
        return jax.tree.map(jnp.add, sums, more), None

    init_B = jnp.zeros(h_BTD.shape[0], jnp.float32)
    sums = jax.lax.scan(body, (init_B, init_B), _time_chunks(h_BTD, targets_BT, marks_BT, chunk=chunk))[0]
    marked_B, missed_B = (x.reshape(n_pieces, n_batch).sum(0) for x in sums)
    return marked_B, missed_B


def _time_chunks(h_BTD: Array, targets_BT: Array, *weights: Array, chunk: int) -> tuple[Array, ...]:
    """Return time chunks on axis 0, padded with weight 0.

    A batch that is sharded over devices stays sharded.
    """
    n_batch, seq_len, _ = h_BTD.shape
    width = min(seq_len, max(1, chunk // n_batch))
    n_chunks = -(-seq_len // width)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, n_chunks * width - seq_len)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(n_batch, n_chunks, width, *x.shape[2:]), 1, 0)

    return tuple(split(x) for x in (h_BTD, targets_BT, *weights))


def _logits(w_DO: Array, h_BCD: Array, y_BC: Array) -> tuple[Array, Array, Array]:
    logits_BCO = jnp.einsum("bcd,do->bco", h_BCD, w_DO, preferred_element_type=jnp.float32)
    lse_BC = jax.nn.logsumexp(logits_BCO, axis=-1)
    target_logit_BC = jnp.take_along_axis(logits_BCO, y_BC[..., None], axis=-1)[..., 0]
    return logits_BCO, lse_BC, target_logit_BC


def _losses_and_gradient(
    w_DO: Array, h_BCD: Array, y_BC: Array, weight_BC: Array, *, implementation: str | None
) -> tuple[Array, Array]:
    """Return the weighted losses, summed over a time chunk, and the logits' gradient."""
    losses_BC, g_BCO = kernels_pallas.cross_entropy(
        jnp.einsum("bcd,do->bco", h_BCD, w_DO, preferred_element_type=jnp.float32),
        y_BC,
        weight_BC,
        dtype=h_BCD.dtype,
        is_vocabulary_split=splits_vocabulary(w_DO.shape[1]),
        implementation=implementation,
    )
    return jnp.sum(weight_BC * losses_BC, axis=1), g_BCO


def _forward(
    h_BTD: Array,
    w_DO: Array,
    copies_NDO: Array,
    targets_BT: Array,
    weights_BT: Array,
    chunk: int,
    implementation: str | None,
):
    cast_w_DO, pieces = w_DO.astype(h_BTD.dtype), len(copies_NDO)

    def body(carry, xs):
        loss_B, g_BCO = _losses_and_gradient(cast_w_DO, *xs, implementation=implementation)
        dw_MO = constrain_pieces(carry[1] + _weight_gradients(xs[0], g_BCO, pieces), pieces)
        return (carry[0] + loss_B, dw_MO), jnp.einsum("bco,do->bcd", g_BCO, cast_w_DO)

    (n_batch, seq_len, dim), n_vocab = h_BTD.shape, w_DO.shape[1]
    init_MO = constrain_pieces(jnp.zeros((pieces * dim, n_vocab), jnp.float32), pieces)
    init = (jnp.zeros(n_batch, jnp.float32), init_MO)
    (loss_B, dw_MO), dh_cBCD = jax.lax.scan(body, init, _time_chunks(h_BTD, targets_BT, weights_BT, chunk=chunk))
    dh_BTD = jnp.moveaxis(dh_cBCD, 0, 1).reshape(n_batch, -1, dim)[:, :seq_len]
    return jnp.sum(loss_B), (dh_BTD, dw_MO.reshape(copies_NDO.shape).astype(copies_NDO.dtype))


def _weight_gradients(h_BCD: Array, g_BCO: Array, pieces: int) -> Array:
    """Return the float32 weight gradients, stacked over row pieces, [N * D, O].

    In this layout each device holds a matrix, to which XLA can add a product in place.

    With a tied head this product is transposed, and XLA's CPU backend then fails with "Unsupported element type for
    DotThunk::Execute: BF16 x BF16 = F32" (jaxlib 0.10.2). Casting the operands to float32 gives the same sums, since
    products of bfloat16 numbers are exact in float32.
    """
    if jax.default_backend() == "cpu":
        h_BCD, g_BCO = h_BCD.astype(jnp.float32), g_BCO.astype(jnp.float32)
    h_NRD, g_NRO = (x.reshape(pieces, -1, x.shape[-1]) for x in (h_BCD, g_BCO))
    dw_NDO = jnp.einsum("nrd,nro->ndo", h_NRD, g_NRO, preferred_element_type=jnp.float32)
    return dw_NDO.reshape(-1, dw_NDO.shape[-1])


def _backward(chunk: int, implementation: str | None, grads: tuple[Array, Array], cotangent: Array):
    del chunk, implementation
    dh_BTD, d_copies_NDO = grads
    return (
        dh_BTD * cotangent.astype(dh_BTD.dtype),
        None,
        d_copies_NDO * cotangent.astype(d_copies_NDO.dtype),
        None,
        None,
    )


_cross_entropy.defvjp(_forward, _backward)
