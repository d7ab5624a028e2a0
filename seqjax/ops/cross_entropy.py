"""Next-token cross-entropy from hidden states, without the logits of the whole batch.

L = sum_i w_i (logsumexp_o(h_i W_o) - h_i W_{y_i}), in nats. At T = 102,400 and a vocabulary of 32,000 the float32 logits would
take 13 GB, so tokens go through in chunks of `chunk`. The loss is a scalar, hence its gradient is linear in the incoming
cotangent: the forward pass already makes dL/dh and dL/dW of each chunk while its logits exist, and the backward pass
only scales them. That is three matrix products instead of the four of a recomputation.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from seqjax.types import Array


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy(
    h_BTD: Float[Array, "B T D"],
    w_DO: Float[Array, "D O"],
    targets_BT: Int[Array, "B T"],
    weights_BT: Float[Array, "B T"],
    chunk: int = 4096,
) -> Float[Array, ""]:
    """Weighted sum over tokens, float32. `chunk` bounds the tokens whose logits exist at a time (at least one per row).

    Differentiable in `h_BTD` and `w_DO`. Logits are computed in the dtype of `h_BTD` with float32 accumulation.
    """
    return _scan(h_BTD, w_DO, targets_BT, weights_BT, chunk, with_grad=False)[0]


def _scan(h_BTD: Array, w_DO: Array, targets_BT: Array, weights_BT: Array, chunk: int, *, with_grad: bool):
    n_batch, seq_len, dim = h_BTD.shape
    width = min(seq_len, max(1, chunk // n_batch))
    n_chunks = -(-seq_len // width)
    pad = n_chunks * width - seq_len

    # Chunks are cut along time, so a batch that is split over devices stays split.
    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(n_batch, n_chunks, width, *x.shape[2:]), 1, 0)

    w = w_DO.astype(h_BTD.dtype)

    def body(carry, xs):
        h_BCD, y_BC, weight_BC = xs
        logits_BCO = jnp.einsum("bcd,do->bco", h_BCD, w, preferred_element_type=jnp.float32)
        lse_BC = jax.nn.logsumexp(logits_BCO, axis=-1)
        picked_BC = jnp.take_along_axis(logits_BCO, y_BC[..., None], axis=-1)[..., 0]
        loss = carry[0] + jnp.sum(weight_BC * (lse_BC - picked_BC))
        if not with_grad:
            return (loss,), None
        p_BCO = jnp.exp(logits_BCO - lse_BC[..., None])
        hit_BCO = y_BC[..., None] == jnp.arange(w.shape[1])
        g_BCO = ((p_BCO - hit_BCO) * weight_BC[..., None]).astype(h_BCD.dtype)
        dh_BCD = jnp.einsum("bco,do->bcd", g_BCO, w)
        dw_DO = jnp.einsum("bcd,bco->do", h_BCD, g_BCO, preferred_element_type=jnp.float32)
        return (loss, carry[1] + dw_DO), dh_BCD

    zero = jnp.zeros((), jnp.float32)
    init = (zero, jnp.zeros(w_DO.shape, jnp.float32)) if with_grad else (zero,)
    carry, dh = jax.lax.scan(body, init, (cut(h_BTD), cut(targets_BT), cut(weights_BT)))
    if not with_grad:
        return carry[0], None
    dh_BTD = jnp.moveaxis(dh, 0, 1).reshape(n_batch, -1, dim)[:, :seq_len]
    return carry[0], (dh_BTD, carry[1].astype(w_DO.dtype))


def _forward(h_BTD, w_DO, targets_BT, weights_BT, chunk):
    return _scan(h_BTD, w_DO, targets_BT, weights_BT, chunk, with_grad=True)


def _backward(chunk, grads, cotangent):
    del chunk
    dh_BTD, dw_DO = grads
    return (dh_BTD * cotangent.astype(dh_BTD.dtype), dw_DO * cotangent.astype(dw_DO.dtype), None, None)


cross_entropy.defvjp(_forward, _backward)
