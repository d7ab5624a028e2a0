"""Launch the Triton kernels of linear attention; custom VJP and tile sizes.

The recurrence and the letters (g, X, U, dY, a~) are defined in `linear_attention/api.py`. The passes are:

    forward    sums: g [B, c C, H, K] fp32
               pairs, solve, mix: the inverses X [B, T, H, C] and the parts of U (only with a low-rank part)
               state: the states at the chunk starts [B, c, H, K, V] and U [B, T, H, V], in the dtype of v
               out: the outputs
    backward   sums, mix, state: g again, the state gradients and dY
               out, d_scores, keys, sums: the input gradients

If b is k, as in KDA, V + U = X (V + a~ S) replaces both V and U, and its gradient dY is also dV (tied_kernels.py):

    forward    weights, solve, pass: g, the operands with their decays and N = r|k; X; the states, V + U and the outputs
    backward   weights, pass: these operands again, the state gradients and dY
               d_scores, keys: the other gradients

If there are too few sequences to fill the GPU, time is cut into segments, and `state` or `pass` is launched twice
(state_scan/triton/segments.py). The backward pass keeps the inputs, the states, X and U. If b is
k, it keeps X, V + U, N and, instead of log w, g.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from kernels_pallas.batching import fold_vmap
from kernels_pallas.linear_attention.interface import every_decay
from kernels_pallas.linear_attention.triton import kernels, keys_kernels, low_rank_kernels, tied_kernels
from kernels_pallas.state_scan.triton import segments
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton.blocks import block_of, longest_chunk, padded, precision

STRONGEST = 59.0  # weight_kernels.BOUND (86 to base 2) in base e, rounded down


class Tile(NamedTuple):
    """Tile settings for a kernel.

    block, keys: at most this many value columns and keys per block; warps: warps per program; stages: blocks or chunks
    in flight.
    """

    block: int
    keys: int
    warps: int
    stages: int


# Keyed by kernel and input bits. `sums`, `state` and `pass` hold all keys in a tile. 16-bit entries are the fastest of
# 24 on one H200 at RWKV-7's sizes (lab/log/kernels.md). Exceptions: `state` and `out` are the fastest over heads of 64,
# 96 and 128 on one H100, and `d_scores`, `weights` and `pass` are not measured. 32-bit entries spill little, except
# `keys` and `pass`.
TILES = {
    ("sums", 16): Tile(16, 128, 4, 1),
    ("pairs", 16): Tile(16, 64, 4, 1),
    ("solve", 16): Tile(16, 16, 1, 1),
    ("mix", 16): Tile(64, 64, 4, 1),
    ("weights", 16): Tile(16, 32, 4, 1),
    ("pass", 16): Tile(64, 128, 4, 1),
    ("state", 16): Tile(64, 128, 4, 2),
    ("out", 16): Tile(128, 64, 4, 2),
    ("d_scores", 16): Tile(128, 16, 4, 1),
    ("keys", 16): Tile(128, 32, 4, 1),
    ("sums", 32): Tile(16, 128, 4, 1),
    ("pairs", 32): Tile(16, 32, 4, 1),
    ("solve", 32): Tile(16, 16, 1, 1),
    ("mix", 32): Tile(16, 32, 4, 1),
    ("weights", 32): Tile(16, 32, 4, 1),
    ("pass", 32): Tile(16, 128, 4, 1),
    ("state", 32): Tile(16, 128, 4, 1),
    ("out", 32): Tile(16, 32, 4, 1),
    ("d_scores", 32): Tile(16, 16, 4, 1),
    ("keys", 32): Tile(16, 32, 4, 1),
}


class Way(NamedTuple):
    """Static choices for a call.

    chunk: positions per chunk; is_mild: whether no chunk decays below e^-STRONGEST.
    """

    chunk: int
    is_mild: bool


def tile(kernel: str, dtype: Any) -> Tile:
    """Return the kernel's tile; the interpreter's small tile gives several blocks."""
    return Tile(16, 16, 4, 1) if interpreter.is_chosen() else TILES[kernel, jnp.finfo(dtype).bits]


def stages_of(kernel: str, entry: Tile, block: int, V: int, *, is_crowded: bool) -> int:
    """Return how many value blocks or chunks are in flight.

    `is_crowded` marks the reverse `state` or `pass` with a low-rank part. It loads the most: `state` has no room for
    another chunk, and `pass` gains 43 of 235 us by it (KDA at 110m on one H200).
    """
    if kernel == "pass" and is_crowded:
        return entry.stages + 1
    if kernel == "out" and block >= V:
        return 1
    if kernel == "state" and block <= 32 < entry.block and not is_crowded:
        return entry.stages + 1  # half-size blocks leave room for one more chunk
    return entry.stages


def run(
    r_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    log_w_BTHK: Array,
    u_HK: Array | None,
    a_BTHK: Array | None,
    b_BTHK: Array | None,
    initial_BHKV: Array,
    *,
    chunk_size: int,
    min_log_w: float,
) -> tuple[Array, Array]:
    """Return (o [B, T, H, V], last state)."""
    dtype = v_BTHV.dtype
    chunk = min(longest_chunk(dtype), padded(min(chunk_size, v_BTHV.shape[1])))
    r, k = r_BTHK.astype(dtype), k_BTHK.astype(dtype)
    low = [x.astype(dtype) for x in (a_BTHK, b_BTHK) if x is not None]  # a without b: b is k
    # `weights` applies the floor itself, which spares a mask of its gradient.
    log_w = jnp.broadcast_to(log_w_BTHK, r.shape) if len(low) == 1 else every_decay(log_w_BTHK, r_BTHK)
    # One copy per batch entry, because vmap and sharding rules need a leading batch dim.
    bonus = () if u_HK is None else (jnp.broadcast_to(u_HK, (v_BTHV.shape[0], *u_HK.shape)),)
    way = Way(chunk, is_mild=chunk * min_log_w > -STRONGEST)
    out: Any = _chunked(way, r, k, v_BTHV, log_w, bonus, tuple(low), initial_BHKV)
    return out


# Parts of sharding rules (batching.py): r, k and v; log w too; a bonus; a low-rank part. `g` names the heads.
_OPERANDS = "b t g k, b t g k, b t g v"
_INPUTS = f"{_OPERANDS}, b t g k"
_BONUS, _LOW, _STATES = ", b g k", ", b t g k", "b c g k v"
# Saved in addition to the states, by the number of low-rank operands: X, V + U, r|k and g; X and U. g replaces log w.
_SOLVED = ("", ", b t g q, b t g v, b t g q, b p g k", ", b t g q, b t g v")
_SOLVED_NAMES = ("chunk_inverse", "chunk_states", "chunk_inverse", "chunk_states")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(way: Way, r, k, v, log_w, bonus, low, initial) -> tuple[Array, Array]:
    return _forward(way, r, k, v, log_w, bonus, low, initial)[0]


def _forward(way: Way, r, k, v, log_w, bonus, low, initial):
    rule = _INPUTS + _BONUS * len(bonus) + _LOW * len(low)
    rule += f", b g k v -> b t g v, b g k v, {_STATES}" + _SOLVED[len(low)]
    body = partial(_run_forward, way=way, has_bonus=bool(bonus), n_low=len(low))
    o, last, states, *solved = fold_vmap(body, rule)(r, k, v, log_w, *bonus, *low, initial)
    # Same names as in other recurrences: one remat policy keeps them all.
    states = checkpoint_name(states, "chunk_states")
    solved = [checkpoint_name(x, name) for x, name in zip(solved, _SOLVED_NAMES, strict=False)]
    if len(low) == 1:
        log_w = None
    return (o, last), (r, k, v, log_w, bonus, low, states, solved)


def _backward(way: Way, saved: tuple, cotangents: tuple[Array, Array]) -> tuple:
    r, k, v, log_w, bonus, low, states, solved = saved
    decays = () if log_w is None else (log_w,)
    more = _BONUS * len(bonus) + _LOW * len(low)
    rule = f"{_OPERANDS}{_LOW * len(decays)}{more}, {_STATES}{_SOLVED[len(low)]}, b t g v, b g k v"
    rule += f" -> {_INPUTS}{more}, b g k v"
    body = partial(_run_backward, way=way, has_bonus=bool(bonus), n_low=len(low))
    dr, dk, dv, dlog_w, *rest, d_initial = fold_vmap(body, rule)(
        r, k, v, *decays, *bonus, *low, states, *solved, *cotangents
    )
    return dr, dk, dv, dlog_w, tuple(rest[: len(bonus)]), tuple(rest[len(bonus) :]), d_initial


_chunked.defvjp(_forward, _backward)


def _run_forward(r, k, v, log_w, *rest, way: Way, has_bonus: bool, n_low: int) -> tuple[Array, ...]:
    *rest, initial = rest
    bonus, low = rest[:has_bonus], rest[has_bonus:]
    if n_low == 1:
        return _run_tied_forward(r, k, v, log_w, low[0], initial, way=way)
    a, b = low or (r, k)
    (B, T, H, K), V = r.shape, v.shape[-1]
    launch = partial(launch_kernel, shapes=(r, v), way=way, has_bonus=has_bonus, n_low=n_low)
    (g,) = launch("sums", log_w, out=[_sums_of(log_w, way.chunk)])
    u = bonus[0] if has_bonus else g  # placeholder without a bonus: not read
    inverse, z, x = v, v, v
    if n_low:
        (pairs,) = launch("pairs", a, b, g, out=[jax.ShapeDtypeStruct((B, T, H, way.chunk), g.dtype)])
        (inverse,) = launch("solve", pairs, out=[jax.ShapeDtypeStruct((B, T, H, way.chunk), v.dtype)])
        z, x = launch("mix", inverse, a, k, v, g, out=[v, r])
    states = jax.ShapeDtypeStruct((B, -(-T // way.chunk), H, K, V), v.dtype)
    decays = None if n_low else g[:, way.chunk - 1 :: way.chunk]
    like = [states, v if n_low else _none(v)]
    states, z, last = pass_states("state", partial(launch, "state", k, v, b, z, x, g), initial, like, decays=decays)
    (o,) = launch("out", r, k, v, b, z, u, g, states, out=[v])
    return o, last, states, *((inverse, z) if n_low else ())


def _run_tied_forward(r, k, v, log_w, a, initial, *, way: Way) -> tuple[Array, ...]:
    """Compute `_run_forward` with b = k."""
    (B, T, H, K), V = r.shape, v.shape[-1]
    launch = partial(launch_kernel, shapes=(r, v), way=way, has_bonus=False, n_low=1)
    square = partial(jax.ShapeDtypeStruct, (B, T, H, way.chunk))
    sizes = [_sums_of(log_w, way.chunk), r, r, k, square(log_w.dtype), square(v.dtype)]
    g, r_in, a_in, k_out, pairs, n = launch("weights", r, a, k, log_w, out=sizes, has_scores=True)
    (inverse,) = launch("solve", pairs, out=[square(v.dtype)])
    like = [jax.ShapeDtypeStruct((B, -(-T // way.chunk), H, K, V), v.dtype), v, v]
    states, z, o, last = pass_states(
        "pass", partial(launch, "pass", r_in, a_in, k_out, v, inverse, n, g), initial, like
    )
    return o, last, states, inverse, z, n, g


def _run_backward(r, k, v, *rest, way: Way, has_bonus: bool, n_low: int) -> tuple[Array, ...]:
    *rest, do, d_last = rest
    decays, rest = rest[: n_low != 1], rest[n_low != 1 :]
    bonus, low, (states, *solved) = rest[:has_bonus], rest[has_bonus : has_bonus + n_low], rest[has_bonus + n_low :]
    launch = partial(launch_kernel, shapes=(r, v), way=way, has_bonus=has_bonus, n_low=n_low)
    reverse = partial(launch, is_reverse=True)
    log_w = jax.ShapeDtypeStruct(r.shape, d_last.dtype)
    no = _none(log_w)
    if n_low == 1:
        a, b, (inverse, v, n, g) = low[0], k, solved  # V + U as v
        _, r_in, a_in, k_out, *_ = launch("weights", r, a, k, g, out=[no, r, r, k, no, _none(v)])
        one_pass = partial(reverse, "pass", r_in, a_in, k_out, do, inverse, n, g)
        d_states, dv, _, d_initial = pass_states("pass", one_pass, d_last, [states, v, _none(v)], is_reverse=True)
        u, z, dz = g, v, dv
    else:
        a, b, inverse, z = *(low or (r, k)), *(solved or (v, v))
        (g,) = launch("sums", *decays, out=[_sums_of(log_w, way.chunk)])
        u = bonus[0] if has_bonus else g
        dz, x = do, r
        if n_low:
            dz, x = reverse("mix", inverse, b, r, do, g, out=[v, r])
        decays = None if n_low else g[:, way.chunk - 1 :: way.chunk]
        one_pass = partial(reverse, "state", r, do, a, dz, x, g)
        like = [states, v if n_low else _none(v)]
        d_states, dz, d_initial = pass_states("state", one_pass, d_last, like, decays=decays, is_reverse=True)
        (dv,) = reverse("out", k, r, do, a, dz, u, g, d_states, out=[v])
    B, c, H, *_ = states.shape
    pairs = jax.ShapeDtypeStruct((B, c, H, (1, 2, 4)[n_low], way.chunk, way.chunk), v.dtype)
    own = jax.ShapeDtypeStruct((B, c, H, (1, 1, 2)[n_low], way.chunk), g.dtype)
    pairs, own = launch("d_scores", do, dz, v, z, out=[pairs, own])
    by_chunk = jax.ShapeDtypeStruct(states.shape[:-1], g.dtype) if has_bonus else no
    like = [r, r if n_low else no, k, r if n_low == 2 else no, log_w if n_low == 1 else g, by_chunk]
    dr, da, dk, db, dlog_w, du = launch("keys", r, do, a, dz, k, v, b, z, u, g, states, d_states, pairs, own, out=like)
    d_low = (da, db)[:n_low]
    if n_low != 1:
        (dlog_w,) = reverse("sums", dlog_w, out=[log_w])
    return dr, dk, dv, dlog_w, *([du.sum(1)] if has_bonus else []), *d_low, d_initial


def pass_states(
    kind: str, launch: Any, start: Array, like: list, *, decays: Array | None = None, is_reverse: bool = False
) -> tuple[Array, ...]:
    """Return the results of the kernel `kind`, `state` or `pass`, the last state last.

    `decays` are log2 of each chunk's decay, without a low-rank part.
    """
    block = block_of(tile(kind, like[0].dtype).block, start.shape[-1])
    return segments.pass_states(launch, start, like, block=block, reverse=is_reverse, log2_decays_BcHK=decays)


def _sums_of(log_w: Any, chunk: int) -> jax.ShapeDtypeStruct:
    """Return the shape of the running sums, padded to whole chunks."""
    B, T, H, K = log_w.shape
    return jax.ShapeDtypeStruct((B, -(-T // chunk) * chunk, H, K), log_w.dtype)


def _none(like: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of a result that the kernel does not write."""
    return jax.ShapeDtypeStruct((1,), like.dtype)


KERNELS = {
    "sums": kernels.sums_kernel,
    "pairs": low_rank_kernels.pairs_kernel,
    "solve": low_rank_kernels.solve_kernel,
    "mix": low_rank_kernels.mix_kernel,
    "weights": tied_kernels.weights_kernel,
    "pass": tied_kernels.pass_kernel,
    "state": kernels.state_kernel,
    "out": kernels.out_kernel,
    "d_scores": keys_kernels.d_scores_kernel,
    "keys": keys_kernels.keys_kernel,
}


def launch_kernel(
    kind: str,
    *arrays,
    out: list,
    shapes: tuple,
    way: Way,
    has_bonus: bool,
    n_low: int,
    is_reverse: bool = False,
    segment: int = 1,
    ends: bool = False,
    has_scores: bool = False,
    gated: bool = False,
) -> Any:
    """Launch a kernel over all chunks of all heads, or over segments of chunks.

    `shapes` are r and v. Only `state` and `pass` use `segment`, the chunks per time segment, and `ends`
    (state_scan/triton/segments.py). Only `weights` uses `has_scores`. `gated` is for `kda`: a follows its own decay,
    and only g's ends are in memory.
    """
    (B, T, H, K), V = shapes[0].shape, shapes[1].shape[-1]
    dtype = shapes[1].dtype
    entry, chunk = tile(kind, dtype), way.chunk
    block, keys = block_of(entry.block, V), block_of(entry.keys, K)
    stages = stages_of(kind, entry, block, V, is_crowded=is_reverse and n_low > 0)
    programs = -(-T // chunk)
    if kind in ("state", "pass"):
        programs = -(-programs // segment) * -(-(V + K if ends and n_low else V) // block)
    elif kind == "keys":
        programs *= -(-K // keys)
    constants: dict[str, Any] = {"T": T, "H": H, "K": K, "KP": padded(K), "KEYS": keys, "C": chunk, "V": V}
    constants |= {"BLOCK": block, "BONUS": has_bonus, "LOW_RANK": n_low > 0, "TIED": n_low == 1}
    constants |= {"REVERSE": is_reverse, "BOUNDED": T % chunk != 0, "MILD": way.is_mild, "STAGES": stages}
    constants |= {"SEGMENT": segment, "ENDS": ends, "SCORES": has_scores, "PRECISION": precision(dtype)}
    constants |= {"BEFORE": not gated, "SUMS": 1 if gated else chunk}
    kernel = KERNELS[kind]
    return runtime.launch(
        kernel,
        *arrays,
        out_shape=[jax.ShapeDtypeStruct(t.shape, t.dtype) for t in out],
        grid=(B * H * programs,),
        num_warps=entry.warps,
        num_stages=stages,
        name=f"linear_attention_{kind}{'_ends' * ends}{'_reverse' * is_reverse}",
        **{name: value for name, value in constants.items() if name in kernel.arg_names},
    )
