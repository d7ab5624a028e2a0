"""Launch the Triton kernels of KDA; custom VJP and tile sizes.

    forward    weights, solve, pass: the weighted operands, both scores and the ends of g; X; states, Z and outputs
    backward   pass, d_scores, keys: the state gradients and dY = dv; the score gradients; the other gradients

`weights` and `keys` are here, the others are linear_attention's. The backward pass keeps the inputs except v, the
weighted operands, X, N, Z, the states and the ends of g.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from kernels_pallas.batching import fold_vmap
from kernels_pallas.kda.triton import kernels
from kernels_pallas.linear_attention.triton import scan as linear
from kernels_pallas.linear_attention.triton.scan import Way
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton.blocks import block_of, longest_chunk, padded, precision


class Tile(NamedTuple):
    """Tile settings for a kernel: keys per block, warps per program, blocks in flight."""

    keys: int
    warps: int
    stages: int


# Keyed by kernel and input bits. 16-bit entries are the fastest of three on one H200 (lab/log/kernels.md).
TILES = {
    ("weights", 16): Tile(32, 4, 2),
    ("keys", 16): Tile(32, 4, 1),
    ("weights", 32): Tile(32, 4, 1),
    ("keys", 32): Tile(16, 4, 1),
}


def run(
    q_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    decay_BTHK: Array,
    beta: Array,
    rate_H: Array,
    bias_HK: Array,
    initial_BHKV: Array,
    *,
    lower_bound: float | None,
    chunk_size: int,
) -> tuple[Array, Array]:
    """Return (o [B, T, H, V], last state)."""
    B, T, *_ = v_BTHV.shape
    chunk = min(longest_chunk(v_BTHV.dtype), padded(min(chunk_size, T)))
    # One copy per batch entry, because vmap and sharding rules need a leading batch dim.
    rate_BH, bias_BHK = (jnp.broadcast_to(x, (B, *x.shape)) for x in (rate_H, bias_HK))
    out: Any = _chunked(chunk, lower_bound, q_BTHK, k_BTHK, v_BTHV, decay_BTHK, beta, rate_BH, bias_BHK, initial_BHKV)
    return out


# Parts of sharding rules (batching.py). `g` names the heads; beta has key channels or not.
_INPUTS = "b t g k, b t g k, b t g k, b t g{}, b g, b g k"
_SAVED = "b c g k v, b t g k, b t g k, b t g k, b t g q, b t g q, b t g v, b c g k"
_NAMES = ("chunk_states", *["chunk_states"] * 3, "chunk_inverse", "chunk_inverse", "chunk_states", "chunk_states")


def _inputs(beta: Array, like: Array) -> str:
    return _INPUTS.format(" k" if beta.ndim == like.ndim else "")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(chunk: int, lower_bound: float | None, q, k, v, decay, beta, rate, bias, initial) -> tuple[Array, Array]:
    return _forward(chunk, lower_bound, q, k, v, decay, beta, rate, bias, initial)[0]


def _forward(chunk: int, lower_bound: float | None, q, k, v, decay, beta, rate, bias, initial):
    rule = f"{_inputs(beta, q)}, b t g v, b g k v -> b t g v, b g k v, {_SAVED}"
    body = partial(_run_forward, chunk=chunk, lower_bound=lower_bound)
    inputs = (q, k, decay, beta, rate, bias)
    o, last, *saved = fold_vmap(body, rule)(*inputs, v, initial)
    # Same names as in other recurrences: one remat policy keeps them all.
    saved = [checkpoint_name(x, name) for x, name in zip(saved, _NAMES, strict=True)]
    return (o, last), (inputs, saved)


def _backward(chunk: int, lower_bound: float | None, kept: tuple, cotangents: tuple[Array, Array]) -> tuple:
    inputs, saved = kept
    names = _inputs(inputs[3], inputs[0])
    rule = f"{names}, {_SAVED}, b t g v, b g k v -> {names}, b t g v, b g k v"
    body = partial(_run_backward, chunk=chunk, lower_bound=lower_bound)
    dq, dk, ddecay, dbeta, drate, dbias, dv, d_initial = fold_vmap(body, rule)(*inputs, *saved, *cotangents)
    return dq, dk, dv, ddecay, dbeta, drate, dbias, d_initial


_chunked.defvjp(_forward, _backward)


def _run_forward(q, k, decay, beta, rate, bias, v, initial, *, chunk: int, lower_bound: float | None):
    (B, T, H, K), V = q.shape, v.shape[-1]
    n_chunks, square = -(-T // chunk), partial(jax.ShapeDtypeStruct, (B, T, H, chunk))
    shared = partial(linear.launch_kernel, shapes=(q, v), way=Way(chunk, False), has_bonus=False, n_low=1, gated=True)
    ends = jax.ShapeDtypeStruct((B, n_chunks, H, K), bias.dtype)
    out = [q, q, q, ends, square(bias.dtype), square(v.dtype), _scratch(ends, chunk)]
    q_in, a_in, k_out, ends, pairs, n, _ = _launch(
        "weights", q, k, decay, beta, rate, bias, out=out, V=V, chunk=chunk, lower_bound=lower_bound
    )
    (inverse,) = shared("solve", pairs, out=[square(v.dtype)])
    like = [jax.ShapeDtypeStruct((B, n_chunks, H, K, V), v.dtype), v, v]
    launch = partial(shared, "pass", q_in, a_in, k_out, v, inverse, n, ends)
    states, z, o, last = linear.pass_states("pass", launch, initial, like)
    return o, last, states, q_in, a_in, k_out, inverse, n, z, ends


def _run_backward(q, k, decay, beta, rate, bias, *rest, chunk: int, lower_bound: float | None):
    states, q_in, a_in, k_out, inverse, n, z, ends, do, d_last = rest
    (B, c, H, _), V = ends.shape, z.shape[-1]
    shared = partial(linear.launch_kernel, shapes=(q, z), way=Way(chunk, False), has_bonus=False, n_low=1, gated=True)
    launch = partial(shared, "pass", q_in, a_in, k_out, do, inverse, n, ends, is_reverse=True)
    like = [states, z, jax.ShapeDtypeStruct((1,), z.dtype)]
    d_states, dv, _, d_initial = linear.pass_states("pass", launch, d_last, like, is_reverse=True)
    d_pairs = jax.ShapeDtypeStruct((B, c, H, 2, chunk, chunk), z.dtype)
    own = jax.ShapeDtypeStruct((B, c, H, 1, chunk), bias.dtype)
    d_pairs, own = shared("d_scores", do, dv, z, z, out=[d_pairs, own])
    drate = jax.ShapeDtypeStruct((B, c, H), bias.dtype)
    out = [q, k, decay, beta, drate, ends, _scratch(ends, chunk)]
    arrays = (q, k, decay, beta, rate, bias, ends, do, dv, z, states, d_states, d_pairs, own)
    options = {"out": out, "V": V, "chunk": chunk, "lower_bound": lower_bound}
    dq, dk, ddecay, dbeta, drate, dbias, _ = _launch("keys", *arrays, **options)
    return dq, dk, ddecay, dbeta, jnp.sum(drate, axis=1), jnp.sum(dbias, axis=1), dv, d_initial


def _scratch(ends: Any, chunk: int) -> jax.ShapeDtypeStruct:
    """Return the shape of g, which a kernel writes and reads again in chunks of strong decays."""
    B, c, H, K = ends.shape
    return jax.ShapeDtypeStruct((B, c * chunk, H, K), ends.dtype)


def tile(kernel: str, dtype: Any) -> Tile:
    """Return the kernel's tile; the interpreter's small tile gives several blocks."""
    return Tile(16, 4, 1) if interpreter.is_chosen() else TILES[kernel, jnp.finfo(dtype).bits]


def _launch(kind: str, *arrays: Array, out: list, V: int, chunk: int, lower_bound: float | None) -> Any:
    """Launch a kernel over all chunks and heads."""
    q, _, _, beta, *_ = arrays
    (B, T, H, K), entry = q.shape, tile(kind, q.dtype)
    constants: dict[str, Any] = {"T": T, "H": H, "K": K, "KP": padded(K), "V": V, "VP": padded(V), "C": chunk}
    constants |= {"KEYS": block_of(entry.keys, K), "CHANNELS": beta.ndim == q.ndim, "LOWER": lower_bound or 0.0}
    constants["PRECISE"] = interpreter.is_chosen() or jnp.finfo(q.dtype).bits == 32  # the interpreter has no PTX
    constants |= {"BOUNDED": T % chunk != 0, "PRECISION": precision(q.dtype), "STAGES": entry.stages}
    kernel = kernels.weights_kernel if kind == "weights" else kernels.keys_kernel
    return runtime.launch(
        kernel,
        *arrays,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out],
        grid=(B * H * -(-T // chunk),),
        num_warps=entry.warps,
        num_stages=entry.stages,
        name=f"kda_{kind}",
        **{name: value for name, value in constants.items() if name in kernel.arg_names},
    )
