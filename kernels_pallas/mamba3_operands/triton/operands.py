"""Launch the Triton kernels of Mamba-3's operands; custom VJP and tile sizes.

XLA sums the turns of each chunk, [B, c, H, R]. A small kernel adds these sums over the chunks, and the two large
kernels add the turns within their chunk. XLA also makes the first token's key from the previous token. The backward
pass keeps only the inputs.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap
from kernels_pallas.chunks import join_chunks, split_chunks
from kernels_pallas.mamba3_operands.interface import Operands
from kernels_pallas.mamba3_operands.triton import kernels
from kernels_pallas.mamba3_operands.xla import rotated
from kernels_pallas.triton import interpreter, runtime


class Tile(NamedTuple):
    """Tile settings for a kernel: heads and warps per program, heads in flight.

    The backward kernel takes all heads.
    """

    heads: int
    warps: int
    stages: int


# Tokens per chunk, in both kernels. Twice as many need 8 warps or spill in the backward kernel, and halve the parts of
# the bias gradients, [B, c, 2, H, N].
TOKENS = 16
TILES = {"forward": Tile(12, 4, 1), "backward": Tile(0, 4, 2)}


def tokens() -> int:
    """Return the tokens per chunk; the interpreter's small chunks give several programs."""
    return 8 if interpreter.is_chosen() else TOKENS


def run(
    b_BTN: Array,
    c_BTN: Array,
    turn_BTR: Array,
    dt_BTH: Array,
    b_bias_HN: Array,
    c_bias_HN: Array,
    before_BN: Array,
    start_BHR: Array,
) -> Operands:
    """Return the operands."""
    # One copy per batch entry, because vmap and sharding rules need a leading batch dim.
    biases_B2HN = jnp.broadcast_to(jnp.stack([b_bias_HN, c_bias_HN]), (len(b_BTN), 2, *b_bias_HN.shape))
    results: Any = _prepared(b_BTN, c_BTN, turn_BTR, dt_BTH, biases_B2HN, before_BN, start_BHR)
    return Operands(*results)


@jax.custom_vjp
def _prepared(*inputs: Array) -> tuple[Array, ...]:
    return _forward(*inputs)[0]


# Parts of a sharding rule (batching.py). `g` names the heads. Gradients of inputs that lack it are sums over heads.
_INPUTS = "b t n, b t n, b t r, b t g, b two g n, b n, b g r"
_RESULTS = "b t g n, b t g n, b t g, b g r"


def _forward(*inputs: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    return tuple(fold_vmap(_run_forward, f"{_INPUTS} -> {_RESULTS}")(*inputs)), inputs


def _backward(inputs: tuple[Array, ...], gradients: tuple[Array, ...]) -> tuple[Array, ...]:
    results = fold_vmap(_run_backward, f"{_INPUTS}, {_RESULTS} -> {_INPUTS}")(*inputs, *gradients)
    return tuple(dx.astype(x.dtype) for dx, x in zip(results, inputs, strict=True))


_prepared.defvjp(_forward, _backward)


def _run_forward(b, c, turn, dt, biases, before, start) -> tuple[Array, ...]:
    (B, T, N), H = b.shape, dt.shape[-1]
    starts, last = _angles(turn, dt, start)
    first = _first_key(before, biases[:, 0], start).astype(b.dtype)
    k, heads = jax.ShapeDtypeStruct((B, T, H, N), b.dtype), 2 if interpreter.is_chosen() else TILES["forward"].heads
    sizes = {"HEADS": heads, "NP": _power(N)}
    return *_launch("forward", b, c, turn, dt, starts, biases, first, out=[k, k, dt], **sizes), last


def _run_backward(b, c, turn, dt, biases, before, start, d_k, d_q, d_own, d_last) -> tuple[Array, ...]:
    """Return the gradients of all inputs.

    Gradients of B, C and `before` are float32: heads on other devices may have to be added.
    """
    starts, _ = _angles(turn, dt, start)
    wide = jax.ShapeDtypeStruct(b.shape, turn.dtype)
    parts = jax.ShapeDtypeStruct((*starts.shape[:2], *biases.shape[1:]), biases.dtype)
    operands, out = (b, c, turn, dt, starts, biases, d_k, d_q, d_own), [wide, wide, turn, dt, starts, parts]
    db, dc, dturn, ddt, dstarts, dbiases = _launch("backward", *operands, out=out)
    later_BcHR, dstart = _sums(dstarts, d_last, reverse=True)
    turn_BcCR, dt_BcCH = (split_chunks(x, tokens()) for x in (turn, dt))
    product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    dturn += join_chunks(product("bchr,bcth->bctr", later_BcHR, dt_BcCH), b.shape[1])
    ddt += join_chunks(product("bchr,bctr->bcth", later_BcHR, turn_BcCR), b.shape[1])
    _, pull = jax.vjp(_first_key, before.astype(turn.dtype), biases[:, 0], start)
    dbefore, dbias, dstart_of_first = pull(d_k[:, 0].astype(turn.dtype))
    dbiases = jnp.sum(dbiases, axis=1).at[:, 0].add(dbias)
    return db, dc, dturn, ddt, dbiases, dbefore, dstart + dstart_of_first


def _first_key(before_BN: Array, bias_BHN: Array, start_BHR: Array) -> Array:
    """Return the key of the first token, [B, H, N], made from the token before it."""
    return rotated(before_BN.astype(bias_BHN.dtype)[:, None, None] + bias_BHN[:, None], start_BHR[:, None])[:, 0]


def _angles(turn_BTR: Array, dt_BTH: Array, start_BHR: Array) -> tuple[Array, Array]:
    """Return the angles before each chunk, [B, c, H, R], and after the last token.

    Steps and sums drop whole turns.
    """
    turn_BcCR, dt_BcCH = (split_chunks(x, tokens()) for x in (turn_BTR, dt_BTH))
    step = turn_BcCR[:, :, :, None] * dt_BcCH[..., None]
    return _sums(jnp.sum(step - jnp.floor(step + 0.5), axis=2), start_BHR, reverse=False)


def _sums(x_BcHR: Array, start_BHR: Array, *, reverse: bool) -> tuple[Array, Array]:
    """Return `start` plus all x before each chunk, and plus all x.

    With `reverse`, all x after each chunk. Forward, sums are modulo 1.
    """
    (B, c, H, R) = x_BcHR.shape
    most = 4 if interpreter.is_chosen() else 64
    sums, last = runtime.launch(
        kernels.sums_kernel,
        x_BcHR,
        start_BHR,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (x_BcHR, start_BHR)],
        grid=(B * H,),
        num_stages=1,
        name="mamba3_operands_sums" + ("_reverse" if reverse else ""),
        N_CHUNKS=c,
        H=H,
        R=R,
        RP=_power(R),
        BLOCK=min(most, _power(c)),
        REVERSE=reverse,
    )
    return sums, last


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _launch(name: str, *operands: Array, out: list, **constants: Any) -> tuple[Array, ...]:
    """Launch a kernel over batch entries, chunks and groups of heads."""
    b, _, turn, dt, *_ = operands
    (B, T, N), R, H, entry = b.shape, turn.shape[-1], dt.shape[-1], TILES[name]
    groups = -(-H // constants["HEADS"]) if "HEADS" in constants else 1
    return runtime.launch(
        getattr(kernels, f"{name}_kernel"),
        *operands,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out],
        grid=(B * -(-T // tokens()) * groups,),
        num_warps=entry.warps,
        num_stages=entry.stages,
        name=f"mamba3_operands_{name}",
        T=T,
        H=H,
        N=N,
        R=R,
        RP=_power(R),
        SP=_power(N - 2 * R),
        TOKENS=tokens(),
        STAGES=entry.stages,
        **constants,
    )
