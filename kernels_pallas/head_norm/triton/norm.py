"""Launch the Triton kernels of the head norm; the custom VJP and the tile sizes.

The backward pass keeps only the inputs and computes the norm again: it reads each row once either way.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap
from kernels_pallas.head_norm.interface import Call
from kernels_pallas.head_norm.triton import kernels
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton.blocks import padded


class Tile(NamedTuple):
    """Tile settings for a kernel.

    channels: channels per tile, with padding; each: channels per thread; steps: tiles per program; stages: tiles in
    flight.
    """

    channels: int
    each: int
    steps: int
    stages: int


class Rows(NamedTuple):
    """Tile settings for head dims.

    heads, tokens: heads and tokens per tile; steps: tiles per program; stages: tiles in flight; warps: warps per
    program.
    """

    heads: int
    tokens: int
    steps: int
    stages: int
    warps: int


# Keyed by kernel. A tile of an "all" kernel is one token with all channels. With 8 channels, a thread loads 16 bytes of
# 16-bit inputs at a time. The fastest of up to 81 settings on one H200, at the sizes of RWKV-7 and Mamba-2
# (lab/log/kernels.md).
TILES = {
    "forward": Tile(1024, 8, 4, 3),
    "backward": Tile(512, 16, 16, 2),
    "forward_all": Tile(1, 16, 4, 3),
    "backward_all": Tile(1, 8, 16, 3),
}


def kind_of(kernel: str, call: Call) -> str:
    """Return the TILES key: `kernel`, or with gate first `kernel`_all."""
    return f"{kernel}_all" if call.gate_first else kernel


def rows(kind: str, x_BTHV: Array) -> Rows:
    """Return the tile for x; the interpreter's small tile gives several programs."""
    H, V = x_BTHV.shape[2:]
    is_small, is_all = interpreter.is_chosen(), kind.endswith("_all")
    entry = Tile(padded(V) * 4, 8, 2, 1) if is_small else TILES[kind]
    most = 1 if is_all else max(1, entry.channels // padded(V))
    # Powers of two that divide H leave no group partly empty.
    heads = 1 << (H - 1).bit_length() if is_all else min(H & -H, most, 2 if is_small else H)
    tokens = max(1, most // heads)
    warps = heads * tokens * padded(V) // (32 * entry.each)
    # With five operands, two more tiles in flight take at most 80 KiB; every supported GPU has 99 KiB per program.
    is_wide = heads * tokens * padded(V) * x_BTHV.dtype.itemsize > 8192
    return Rows(heads, tokens, entry.steps, 1 if is_wide else entry.stages, max(1, min(warps, 16)))


def run(
    x_BTHV: Array,
    gate_BTHV: Array | None,
    skip: tuple[Array, Array] | None,
    gain_HV: Array,
    bias_HV: Array | None,
    call: Call,
) -> Array | tuple[Array, Array]:
    """Return y_BTHV, or (x, y)."""
    B, T, H, V = x_BTHV.shape
    if skip is not None:
        skip = skip[0], jnp.broadcast_to(skip[1], (B, T, H))
    # One copy per batch entry, because vmap and sharding rules need a leading batch dim.
    gain, bias = (None if p is None else jnp.broadcast_to(p, (B, H, V)) for p in (gain_HV, bias_HV))
    y: Any = _normed(call, x_BTHV, gate_BTHV, skip, gain, bias)
    return y


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normed(call: Call, x, gate, skip, gain, bias) -> Any:
    return forward(call, x, gate, skip, gain, bias)[0]


def forward(call: Call, *operands: Any) -> tuple[Any, tuple]:
    """Return y, or (x, y), and the operands that the backward pass keeps.

    `operands` is x, gate, skip, gain and bias; gain and bias are [B, H, V].
    """
    run, leaves, dims = _with_rules(_run_forward, call, operands)
    y = run(f"{dims} -> {_DATA}")(*leaves)
    return (operands[0], y) if call.with_input else y, operands


def backward(call: Call, operands: tuple, dy: Any) -> tuple:
    """Return the gradients of `forward`'s operands."""
    run, leaves, dims = _with_rules(_run_backward, call, operands)
    of_results = dy if call.with_input else (dy,)
    gradients = run(f"{dims}{f', {_DATA}' * len(of_results)} -> {dims}")(*leaves, *of_results)
    return jax.tree.unflatten(jax.tree.structure(operands), gradients)


_normed.defvjp(forward, backward)

# Parts of a sharding rule (batching.py). `g` names the heads, which are independent unless one norm spans all heads.
# Tokens are always independent; parameter gradients are sums over tokens.
_DATA, _FACTORS, _PARAMETERS = "b t g v", "b t g", "b g v"


def _with_rules(f: Any, call: Call, operands: tuple) -> tuple[Any, list[Array], str]:
    """Return (rule -> `f` under that rule, present operands, operand dims)."""
    _, gate, skip, _, bias = operands
    dims = [_DATA] * (1 if gate is None else 2) + ([] if skip is None else [_DATA, _FACTORS])
    dims += [_PARAMETERS] * (1 if bias is None else 2)
    leaves, structure = jax.tree.flatten(operands)
    split = ("b", "t") if call.gate_first else ("b", "t", "g")
    run = partial(fold_vmap, partial(f, call=call, structure=structure), split=split)
    return run, leaves, ", ".join(dims)


def _run_forward(*leaves: Array, call: Call, structure: Any) -> Array:
    operands = jax.tree.unflatten(structure, leaves)
    out = jax.ShapeDtypeStruct(operands[0].shape, call.dtype or operands[0].dtype)
    (y,) = _launch(kind_of("forward", call), kernels.forward_kernel, operands, (), out=(out,), call=call)
    return y


def _run_backward(*leaves: Array, call: Call, structure: Any) -> list[Array]:
    n_results = 1 + call.with_input
    x, gate, skip, gain, bias = operands = jax.tree.unflatten(structure, leaves[:-n_results])
    B, T, H, V = x.shape
    kind = kind_of("backward", call)
    entry = rows(kind, x)
    sums = jax.ShapeDtypeStruct((B, -(-T // (entry.tokens * entry.steps)), H, V), gain.dtype)
    nothing = jax.ShapeDtypeStruct((1,), gain.dtype)  # one entry: not written
    data, factors = (nothing, nothing) if skip is None else skip
    out = (x, nothing if gate is None else gate, data, factors, sums, nothing if bias is None else sums)
    more = (leaves[-1], leaves[-n_results])  # dy, and the residual gradient (dy again without one)
    gradients = _launch(kind, kernels.backward_kernel, operands, more, out=out, call=call, PASSED=call.with_input)
    has = (True, gate is not None, skip is not None, skip is not None, True, bias is not None)
    return [d.sum(1) if shape is sums else d for d, shape, there in zip(gradients, out, has, strict=True) if there]


def _launch(
    kind: str, kernel: Any, operands: tuple, more: tuple, *, out: tuple, call: Call, **constants: Any
) -> tuple[Array, ...]:
    """Launch a kernel over the tokens and head groups of x.

    A placeholder, which the kernel does not read, replaces an absent operand.
    """
    x, gate, skip, gain, bias = operands
    B, T, H, V = x.shape
    entry = rows(kind, x)
    return runtime.launch(
        kernel,
        x,
        x if gate is None else gate,
        *((x, gain) if skip is None else skip),
        gain,
        gain if bias is None else bias,
        *more,
        out_shape=[jax.ShapeDtypeStruct(t.shape, t.dtype) for t in out],
        grid=(B * -(-T // (entry.tokens * entry.steps)) * -(-H // entry.heads),),
        num_warps=entry.warps,
        num_stages=entry.stages,
        name=f"head_norm_{kind}",
        T=T,
        H=H,
        V=V,
        VP=padded(V),
        HEADS=entry.heads,
        TOKENS=entry.tokens,
        STEPS=entry.steps,
        EPS=call.eps,
        GATE=gate is not None,
        ACTIVATION=call.activation,
        SKIP=skip is not None,
        BIAS=bias is not None,
        FIRST=call.gate_first,
        STAGES=entry.stages,
        **constants,
    )
