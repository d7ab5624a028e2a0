"""Launch the Triton kernels of RWKV-7's operands; custom VJP and tile sizes.

XLA computes the low-rank products in the input dtype, and the backward pass keeps them in addition to the inputs. The
kernels apply bias and sigmoid in float32.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap
from kernels_pallas.head_norm.triton.norm import Rows, Tile
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton.blocks import padded
from kernels_pallas.wkv7_operands.interface import LowRank, Operands, ValueMix, Vectors
from kernels_pallas.wkv7_operands.triton import kernels

# Keyed by kernel, as for the head norm. Only these tiles were timed, on one H200 (lab/log/kernels.md).
TILES = {"forward": Tile(1024, 8, 4, 1), "backward": Tile(1024, 8, 16, 1)}


def rows(kernel: str, x_BTHK: Array) -> Rows:
    """Return the tile for x; the interpreter's small tile gives several programs."""
    H, K = x_BTHK.shape[2:]
    is_small = interpreter.is_chosen()
    entry = Tile(padded(K) * 4, 8, 2, 1) if is_small else TILES[kernel]
    most = max(1, entry.channels // padded(K))
    heads = min(H & -H, most, 2 if is_small else H)  # powers of two that divide H leave no group partly empty
    tokens = max(1, most // heads)
    warps = heads * tokens * padded(K) // (32 * entry.each)
    return Rows(heads, tokens, entry.steps, entry.stages, max(1, min(warps, 16)))


def run(
    r_BTHK: Array,
    k_BTHK: Array,
    v_BTHK: Array,
    decay: LowRank,
    eta: LowRank,
    vectors: Vectors,
    mix: ValueMix | None,
) -> Operands:
    """Return the operands."""
    B, _, H, K = r_BTHK.shape

    def result(map_: LowRank) -> Array:
        return (map_.hidden_BTR @ map_.matrix_RD.astype(map_.hidden_BTR.dtype)).reshape(r_BTHK.shape)

    data, summands = [r_BTHK, k_BTHK, result(decay), result(eta)], [*vectors, decay.bias_D, eta.bias_D]
    if mix is not None:
        data += [v_BTHK, mix.first_BTHK, result(mix.share)]
        summands.append(jnp.where(mix.is_first_layer, -jnp.inf, mix.share.bias_D))  # the first layer's weight is 0
    # One copy per batch entry, because vmap and sharding rules need a leading batch dim.
    vectors_BNHK = jnp.broadcast_to(jnp.stack(summands).reshape(-1, H, K), (B, len(summands), H, K))
    results: Any = _prepared(tuple(data), vectors_BNHK)
    r, k, log_w, a, b, bonus, *values = results
    v, skip, first = values or (v_BTHK, v_BTHK, None)
    return Operands(r, k, v, log_w, a, b, (skip, bonus), first)


@jax.custom_vjp
def _prepared(data: tuple[Array, ...], vectors_BNHK: Array) -> tuple[Array, ...]:
    return forward(data, vectors_BNHK)[0]


# Parts of a sharding rule (batching.py). `g` names the heads, which are independent, as tokens are.
_DATA, _FACTORS, _VECTORS = "b t g k", "b t g", "b n g k"
_N_ALL = 7  # number of data operands with value mixing


def _rule(operands: list[str], results: list[str]) -> dict[str, Any]:
    return {"rule": f"{', '.join(operands)} -> {', '.join(results)}", "split": ("b", "t", "g")}


def forward(data: tuple[Array, ...], vectors: Array) -> tuple[tuple[Array, ...], tuple]:
    """Return the results and the saved operands.

    Results: r, the kernel's results, and with value mixing the values again (for the norm) and the first layer's
    values.
    """
    has_mix = len(data) == _N_ALL
    rule = _rule([_DATA] * len(data) + [_VECTORS], [_DATA] * 4 + [_FACTORS] + [_DATA] * has_mix)
    results = fold_vmap(_run_forward, **rule)(*data, vectors)
    return (data[0], *results, *((results[-1], data[5]) if has_mix else ())), (data, vectors)


def backward(kept: tuple, gradients: tuple[Array, ...]) -> tuple:
    """Return the gradients of data and vectors."""
    data, vectors = kept
    operands = [_DATA] * len(data) + [_VECTORS]
    rule = _rule([*operands, *[_FACTORS if x.ndim == 3 else _DATA for x in gradients]], operands)
    *ddata, dvectors = fold_vmap(partial(_run_backward, n=len(data)), **rule)(*data, vectors, *gradients)
    return tuple(ddata), dvectors


_prepared.defvjp(forward, backward)


def _run_forward(*operands: Array) -> list[Array]:
    r, has_mix = operands[0], len(operands) > _N_ALL
    wide, bonus = jax.ShapeDtypeStruct(r.shape, jnp.float32), jax.ShapeDtypeStruct(r.shape[:3], jnp.float32)
    nothing = jax.ShapeDtypeStruct((1,), r.dtype)  # one entry: not written
    out = [r, wide, r, r, bonus, r if has_mix else nothing]
    results = _launch("forward", kernels.forward_kernel, operands[:-1], operands[-1], (), out=out)
    return list(results) if has_mix else list(results[:-1])


def _run_backward(*arrays: Array, n: int) -> list[Array]:
    data, vectors, gradients = arrays[:n], arrays[n], arrays[n + 1 :]
    r, has_mix = data[0], n == _N_ALL
    entry = rows("backward", r)
    n_chunks = -(-r.shape[1] // (entry.tokens * entry.steps))
    parts = jax.ShapeDtypeStruct((len(r), n_chunks, *vectors.shape[1:]), vectors.dtype)
    out = [r] * 4 + [r if has_mix else jax.ShapeDtypeStruct((1,), r.dtype)] * 3 + [parts]
    gradients = gradients if has_mix else (*gradients, r, r, r)
    results = _launch("backward", kernels.backward_kernel, data, vectors, gradients, out=out)
    return [*results[:n], jnp.sum(results[-1], axis=1)]


def _launch(
    name: str, kernel: Any, data: tuple[Array, ...], vectors: Array, gradients: tuple[Array, ...], *, out: list
) -> tuple[Array, ...]:
    """Launch a kernel over the tokens and head groups.

    A placeholder replaces an absent operand.
    """
    r = data[0]
    _, T, H, K = r.shape
    entry = rows(name, r)
    return runtime.launch(
        kernel,
        *data,
        *[r] * (_N_ALL - len(data)),
        vectors,
        *gradients,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out],
        grid=(len(r) * -(-T // (entry.tokens * entry.steps)) * -(-H // entry.heads),),
        num_warps=entry.warps,
        num_stages=entry.stages,
        name=f"wkv7_operands_{name}",
        T=T,
        H=H,
        K=K,
        KP=padded(K),
        HEADS=entry.heads,
        TOKENS=entry.tokens,
        STEPS=entry.steps,
        STAGES=entry.stages,
        MIX=len(data) == _N_ALL,
    )
