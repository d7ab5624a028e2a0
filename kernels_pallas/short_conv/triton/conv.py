"""Launch the Triton kernels of the short convolution; custom VJP, tile sizes.

Channels are grouped as heads, [B, T, H, K], with K = 1 without a norm, so a mesh splits heads and keeps each head's
channels together. Taps and bias get a leading batch dim, as vmap requires, and JAX sums their gradients over it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap
from kernels_pallas.short_conv.triton import kernels
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton.blocks import block_of, padded


class Tile(NamedTuple):
    """Tile settings for a kernel.

    block: most channels per block (a normalised head is one block); row: channels of all pieces of time together;
    warps: warps per program; steps: positions per piece; unroll: positions loaded together.
    """

    block: int
    row: int
    warps: int
    steps: int
    unroll: int


# The fastest on one H200 at the sizes of Gated DeltaNet (lab/log/kernels.md): with 4 channels per thread, many programs
# wait for memory at once. Longer pieces load fewer rows twice but leave the GPU fewer programs.
TILES = {"conv": Tile(128, 512, 4, 16, 8), "conv_bwd": Tile(128, 512, 4, 32, 4)}


def tile(kernel: str) -> Tile:
    """Return the kernel's tile; the interpreter's small tile gives several programs."""
    return Tile(16, 64, 4, 8, 4) if interpreter.is_chosen() else TILES[kernel]


class Call(NamedTuple):
    """Static options for a call."""

    silu: bool
    norm: bool
    scale: float
    eps: float


def run(
    x_BTE: Array,
    w_EW: Array,
    b_E: Array | None,
    last_BWE: Array | None,
    reach_BT: Array | None = None,
    *,
    silu: bool,
    l2_heads: int | None,
    scale: float,
    eps: float,
) -> Array:
    """Return y_BTE as defined in `short_conv/api.py`.

    `last_BWE` has the W - 1 inputs before x; None means zeros. Without `l2_heads` there is no norm and no `scale`.
    """
    (B, T, E), W = x_BTE.shape, w_EW.shape[1]
    H = E if l2_heads is None else l2_heads
    y: Any = _by_head(
        x_BTE.reshape(B, T, H, -1),
        jnp.broadcast_to(w_EW, (B, E, W)).reshape(B, H, -1, W),
        None if b_E is None else jnp.broadcast_to(b_E, (B, E)).reshape(B, H, -1),
        None if last_BWE is None or W == 1 else last_BWE.reshape(B, W - 1, H, -1),
        reach_BT,
        Call(silu, l2_heads is not None, scale, eps),
    )
    return y.reshape(B, T, E)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _by_head(x, w, b, last, reach, call: Call) -> Array:
    names, operands, rule = _given(x, w, b, last, reach)
    return fold_vmap(partial(_run_forward, call=call, names=names), f"{rule} -> b t g k")(*operands)


def _forward(x, w, b, last, reach, call: Call):
    return _by_head(x, w, b, last, reach, call), (x, w, b, last, reach)


def _backward(call: Call, saved: tuple, dy: Array) -> tuple:
    names, operands, rule = _given(*saved)
    learned = tuple(name for name in names if name != "reach")
    results = ", ".join(_RULES[name] for name in learned)
    run = fold_vmap(partial(_run_backward, call=call, names=names, learned=learned), f"{rule}, b t g k -> {results}")
    gradients = dict(zip(learned, run(*operands, dy), strict=True))
    return tuple(gradients.get(name) for name in _RULES)


_by_head.defvjp(_forward, _backward)

# Parts of a sharding rule (batching.py); `g` names the heads. A gradient has the dims of its operand.
_RULES = {"x": "b t g k", "w": "b g k w", "b": "b g k", "last": "b n g k", "reach": "b t"}


def _given(*operands: Array | None) -> tuple[tuple[str, ...], list[Array], str]:
    """Return names, arrays and sharding rule of the present operands."""
    present = {name: x for name, x in zip(_RULES, operands, strict=True) if x is not None}
    return tuple(present), list(present.values()), ", ".join(_RULES[name] for name in present)


def _run_forward(*operands: Array, call: Call, names: tuple[str, ...]) -> Array:
    by_name = dict(zip(names, operands, strict=True))
    (y,) = _launch("conv", kernels.conv_kernel, by_name, call=call, out=lambda n_tiles: [by_name["x"]])
    return y


def _run_backward(*operands: Array, call: Call, names: tuple[str, ...], learned: tuple[str, ...]) -> tuple[Array, ...]:
    by_name, dy = dict(zip(names, operands[:-1], strict=True)), operands[-1]
    (B, _, H, K), W = dy.shape, by_name["w"].shape[-1]

    def out(n_tiles: int) -> list:
        parts = jax.ShapeDtypeStruct((B, n_tiles, W + ("b" in by_name), H * K), by_name["w"].dtype)
        # Outputs that the kernel does not write have one entry.
        return [dy, parts, by_name.get("last", jax.ShapeDtypeStruct((1,), dy.dtype))]

    dx, parts, dlast = _launch("conv_bwd", kernels.conv_bwd_kernel, by_name, dy, call=call, out=out)
    sums_BEN = jnp.moveaxis(jnp.sum(parts, axis=1), 1, 2)
    dw, db = sums_BEN[..., :W].reshape(B, H, K, W), sums_BEN[..., W:].reshape(B, H, -1)
    gradients = {"x": dx, "w": dw, "b": db, "last": dlast}
    return tuple(gradients[name] for name in learned)


def _launch(
    name: str, kernel: Any, by_name: dict[str, Array], *more: Array, call: Call, out: Callable[[int], list]
) -> tuple[Array, ...]:
    """Launch `kernel` over channel blocks and time tiles.

    `out` maps the tile count to the result shapes.
    """
    x, w = by_name["x"], by_name["w"]
    (B, T, H, K), W, entry = x.shape, w.shape[-1], tile(name)
    block = K if call.norm else block_of(entry.block, H * K)
    # Short sequences have fewer pieces than a program could take.
    pieces = min(max(1, entry.row // padded(block)), 1 << (-(-T // entry.steps) - 1).bit_length())
    warps = max(1, entry.warps * pieces * padded(block) // entry.row)
    n_tiles = -(-T // (pieces * entry.steps))
    return runtime.launch(
        kernel,
        x,
        w,
        by_name.get("b", w),  # not read without HAS_BIAS
        by_name.get("last", x),  # not read without HAS_LAST
        by_name.get("reach", x),  # not read without HAS_REACH
        *more,
        out_shape=[jax.ShapeDtypeStruct(t.shape, t.dtype) for t in out(n_tiles)],
        grid=(B * n_tiles * -(-H * K // block),),
        num_warps=warps,
        name=f"short_{name}",
        T=T,
        E=H * K,
        W=W,
        K=block,
        KP=padded(block),
        R=pieces,
        STEPS=entry.steps,
        U=entry.unroll,
        SILU=call.silu,
        NORM=call.norm,
        SCALE=call.scale,
        EPS=call.eps,
        HAS_BIAS="b" in by_name,
        HAS_LAST="last" in by_name,
        HAS_REACH="reach" in by_name,
    )
