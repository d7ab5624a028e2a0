"""Launch the Triton kernels of the token shift; custom VJP and tile sizes.

vmap and sharding rules (batching.py) need the batch on axis 1 in all operands. Axis 0 is the branch or has length 1:
moves are [N, B, T, D], the layout of the product that computes them. `mus` get a batch dim, and JAX sums their
gradients over it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap
from kernels_pallas.short_conv.triton.conv import Tile
from kernels_pallas.token_shift.triton import MAX_BRANCHES, kernels
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton.blocks import block_of, padded

# Keyed by kernel, `_moved` with moves. 4 channels per thread, as in the fastest tiles of the short convolution; at most
# 128 registers by the compiler's report. No other tiles were timed (lab/log/kernels.md).
TILES = {
    "shift": Tile(128, 512, 4, 16, 8),
    "shift_bwd": Tile(128, 512, 4, 32, 2),
    "shift_moved": Tile(128, 512, 4, 16, 2),
    "shift_bwd_moved": Tile(128, 512, 4, 32, 1),
}


def tile(kernel: str) -> Tile:
    """Return the kernel's tile; the interpreter's small tile gives several programs."""
    return Tile(16, 64, 4, 8, 4) if interpreter.is_chosen() else TILES[kernel]


def run(
    x_BTD: Array,
    last_BD: Array | None,
    mus: tuple[Array, ...],
    moves_NBTD: Array | None,
    reach_BT: Array | None = None,
) -> tuple[Array, ...]:
    """Return the interpolations."""
    mu_NBD = jnp.broadcast_to(jnp.stack(mus)[:, None], (len(mus), len(x_BTD), x_BTD.shape[2]))
    last, reach = (None if x is None else x[None] for x in (last_BD, reach_BT))
    y: Any = _shifted(x_BTD[None], mu_NBD, moves_NBTD, last, reach)
    return tuple(y_1BTD[0] for y_1BTD in y)


@jax.custom_vjp
def _shifted(x, mu, moves, last, reach) -> tuple[Array, ...]:
    return _forward(x, mu, moves, last, reach)[0]


# Parts of a sharding rule (batching.py); `g` names the channels. A gradient has the dims of its operand.
_RULES = {"x": "o b t g", "mu": "n b g", "moves": "n b t g", "last": "o b g", "reach": "o b t"}


def _given(*operands: Array | None) -> tuple[tuple[str, ...], list[Array], str, str]:
    """Return names, arrays and sharding rule of present operands, and results' rule."""
    present = {name: x for name, x in zip(_RULES, operands, strict=True) if x is not None}
    results = ", ".join([_RULES["x"]] * len(present["mu"]))
    return tuple(present), list(present.values()), ", ".join(_RULES[name] for name in present), results


def _forward(*operands):
    names, arrays, rule, results = _given(*operands)
    y = fold_vmap(partial(_run_forward, names=names), f"{rule} -> {results}", axis=1)(*arrays)
    return y, operands


def _backward(saved: tuple, dy: tuple[Array, ...]) -> tuple:
    names, arrays, rule, results = _given(*saved)
    learned = tuple(name for name in names if name != "reach")
    rule = f"{rule}, {results} -> {', '.join(_RULES[name] for name in learned)}"
    run = fold_vmap(partial(_run_backward, names=names, learned=learned), rule, axis=1)
    gradients = dict(zip(learned, run(*arrays, *dy), strict=True))
    return tuple(gradients.get(name) for name in _RULES)


_shifted.defvjp(_forward, _backward)


def _run_forward(*operands: Array, names: tuple[str, ...]) -> tuple[Array, ...]:
    by_name = dict(zip(names, operands, strict=True))
    x, N = by_name["x"], len(by_name["mu"])
    nothing = jax.ShapeDtypeStruct((1,), x.dtype)  # outputs that the kernel does not write have one entry
    out = [x] * N + [nothing] * (MAX_BRANCHES - N)
    return _launch("shift", kernels.shift_kernel, by_name, out=lambda n_tiles: out)[:N]


def _run_backward(*operands: Array, names: tuple[str, ...], learned: tuple[str, ...]) -> tuple[Array, ...]:
    by_name, dy = dict(zip(names, operands, strict=False)), operands[len(names) :]
    x, mu = by_name["x"], by_name["mu"]
    dy += (x,) * (MAX_BRANCHES - len(dy))

    def out(n_tiles: int) -> list:
        parts = jax.ShapeDtypeStruct((x.shape[1], n_tiles, len(mu), x.shape[3]), mu.dtype)
        nothing = jax.ShapeDtypeStruct((1,), x.dtype)
        return [x, parts, by_name.get("moves", nothing), by_name.get("last", nothing)]

    dx, parts, dmoves, dlast = _launch("shift_bwd", kernels.shift_bwd_kernel, by_name, *dy, out=out)
    gradients = {"x": dx, "mu": jnp.moveaxis(jnp.sum(parts, axis=1), 0, 1), "moves": dmoves, "last": dlast}
    return tuple(gradients[name] for name in learned)


def _launch(
    name: str, kernel: Any, by_name: dict[str, Array], *more: Array, out: Callable[[int], list]
) -> tuple[Array, ...]:
    """Launch `kernel` over channel blocks and time tiles.

    `out` maps the tile count to the result shapes. A placeholder replaces an absent operand.
    """
    x, entry = by_name["x"], tile(f"{name}_moved" if "moves" in by_name else name)
    _, B, T, D = x.shape
    block = block_of(entry.block, D)
    # Short sequences have fewer pieces than a program could take.
    pieces = min(max(1, entry.row // padded(block)), 1 << (-(-T // entry.steps) - 1).bit_length())
    n_tiles = -(-T // (pieces * entry.steps))
    return runtime.launch(
        kernel,
        x,
        by_name["mu"],
        by_name.get("moves", x),
        by_name.get("last", x),
        by_name.get("reach", x),
        *more,
        out_shape=[jax.ShapeDtypeStruct(t.shape, t.dtype) for t in out(n_tiles)],
        grid=(B * n_tiles * -(-D // block),),
        num_warps=max(1, entry.warps * pieces * padded(block) // entry.row),
        name=f"token_{name}",
        B=B,
        T=T,
        D=D,
        N=len(by_name["mu"]),
        K=block,
        KP=padded(block),
        R=pieces,
        STEPS=entry.steps,
        U=entry.unroll,
        HAS_MOVES="moves" in by_name,
        HAS_LAST="last" in by_name,
        HAS_REACH="reach" in by_name,
    )
