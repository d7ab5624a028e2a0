"""Linear attention with a decay per channel in Triton: launches of kernels.py, tile sizes.

Forward: the running sums g of log w, [B, c C, H, K] float32; one pass over the chunks that leaves the states at their
starts, [B, c, H, K, V] in the dtype of v; then every chunk makes its outputs. The backward pass keeps the inputs and
those states. It makes g again, goes back over the chunks for the states' gradients, then makes those of the inputs.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from kernels_pallas.batching import fold_vmap
from kernels_pallas.linear_attention.triton import kernels
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.triton.blocks import block_of, longest_chunk, padded, precision


class Tile(NamedTuple):
    """Columns of the values and keys per block at most, warps, blocks or chunks in flight."""

    block: int
    keys: int
    warps: int
    stages: int


# By kernel and bits of the inputs; `sums` and `state` have all keys in a tile. Chosen by what the compiler reports. None
# was run on a GPU.
TILES = {
    ("sums", 16): Tile(16, 128, 4, 1),
    ("state", 16): Tile(32, 128, 4, 2),
    ("out", 16): Tile(64, 32, 8, 1),
    ("keys", 16): Tile(32, 64, 8, 1),
    ("sums", 32): Tile(16, 128, 4, 1),
    ("state", 32): Tile(16, 128, 4, 1),
    ("out", 32): Tile(16, 32, 4, 1),
    ("keys", 32): Tile(16, 32, 4, 1),
}


def tile(kernel: str, dtype: Any) -> Tile:
    """Return the table's entry; the interpreter's is so small that tests see several blocks."""
    return Tile(16, 16, 4, 1) if interpreter.is_chosen() else TILES[kernel, jnp.finfo(dtype).bits]


def run(
    r_BTHK: Array,
    k_BTHK: Array,
    v_BTHV: Array,
    log_w_BTHK: Array,
    u_HK: Array | None,
    initial_BHKV: Array,
    *,
    chunk_size: int,
) -> tuple[Array, Array]:
    """Return (o [B, T, H, V], the last state)."""
    dtype = v_BTHV.dtype
    chunk = min(longest_chunk(dtype), padded(min(chunk_size, v_BTHV.shape[1])))
    # by sequence, because vmap and meshes need a batch first
    u_BHK = None if u_HK is None else jnp.broadcast_to(u_HK, (v_BTHV.shape[0], *u_HK.shape))
    out: Any = _chunked(chunk, r_BTHK.astype(dtype), k_BTHK.astype(dtype), v_BTHV, log_w_BTHK, u_BHK, initial_BHKV)
    return out


# Of a sharding rule (batching.py): r, k, v, log w and, with a bonus, u; `g` for the heads.
_OPERANDS = "b t g k, b t g k, b t g v, b t g k"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(chunk: int, r, k, v, log_w, u, initial) -> tuple[Array, Array]:
    return _forward(chunk, r, k, v, log_w, u, initial)[0]


def _forward(chunk: int, r, k, v, log_w, u, initial):
    bonus = [] if u is None else [u]
    operands = _OPERANDS + ", b g k" * len(bonus)
    run = fold_vmap(partial(_run_forward, chunk=chunk), f"{operands}, b g k v -> b t g v, b g k v, b c g k v")
    o, last, states = run(r, k, v, log_w, *bonus, initial)
    # Named as those of the other recurrences, so that one policy of rematerialisation keeps either.
    states = checkpoint_name(states, "chunk_states")
    return (o, last), (r, k, v, log_w, u, states)


def _backward(chunk: int, saved: tuple, cotangents: tuple[Array, Array]) -> tuple:
    r, k, v, log_w, u, states = saved
    bonus = [] if u is None else [u]
    more = ", b g k" * len(bonus)
    rule = f"{_OPERANDS}{more}, b c g k v, b t g v, b g k v -> {_OPERANDS}, b g k v{more}"
    run = fold_vmap(partial(_run_backward, chunk=chunk), rule)
    dr, dk, dv, dlog_w, d_initial, *du = run(r, k, v, log_w, *bonus, states, *cotangents)
    return dr, dk, dv, dlog_w, du[0] if du else None, d_initial


_chunked.defvjp(_forward, _backward)


def _run_forward(r, k, v, log_w, *rest, chunk: int) -> tuple[Array, Array, Array]:
    *bonus, initial = rest
    (B, T, H, K), V = r.shape, v.shape[-1]
    launch = partial(_launch, shapes=(r, v), chunk=chunk, has_bonus=bool(bonus), reverse=False)
    g, levels = _sums(launch, log_w, chunk)
    states, last = launch(
        "state", k, v, g, initial, out=[jax.ShapeDtypeStruct((B, -(-T // chunk), H, K, V), r.dtype), initial]
    )
    (o,) = launch("out", r, k, v, bonus[0] if bonus else g, g, levels, states, out=[v])
    return o, last, states


def _run_backward(r, k, v, log_w, *rest, chunk: int) -> tuple[Array, ...]:
    *bonus, states, do, d_last = rest
    launch = partial(_launch, shapes=(r, v), chunk=chunk, has_bonus=bool(bonus))
    forward, reverse = partial(launch, reverse=False), partial(launch, reverse=True)
    g, levels = _sums(forward, log_w, chunk)
    u = bonus[0] if bonus else g
    nothing = jax.ShapeDtypeStruct((1,), g.dtype)  # what is not written has one entry
    by_chunk = jax.ShapeDtypeStruct(states.shape[:-1], g.dtype)
    d_states, d_initial = reverse("state", r, do, g, d_last, out=[states, d_last])
    (dv,) = reverse("out", k, r, do, u, g, levels, d_states, out=[v])
    dr, dg, du = forward(
        "keys", r, do, k, v, u, g, levels, states, states, g, out=[r, g, by_chunk if bonus else nothing]
    )
    dk, dg, _ = reverse("keys", k, v, r, do, u, g, levels, d_states, states, dg, out=[k, g, nothing])
    dlog_w, _ = reverse("sums", dg, out=[log_w, jax.ShapeDtypeStruct((1,), levels.dtype)])
    return dr, dk, dv, dlog_w, d_initial, *([du.sum(1)] if bonus else [])


def _sums(launch: Any, log_w: Array, chunk: int) -> tuple[Array, Array]:
    """Return the running sums of log w in the chunks, and how often the halving of each must halve."""
    B, T, H, K = log_w.shape
    n_chunks = -(-T // chunk)
    sums = jax.ShapeDtypeStruct((B, n_chunks * chunk, H, K), log_w.dtype)
    return launch("sums", log_w, out=[sums, jax.ShapeDtypeStruct((B, n_chunks, H), jnp.int32)])


def _launch(kind: str, *arrays, out: list, shapes: tuple, chunk: int, has_bonus: bool, reverse: bool) -> Any:
    """Launch a kernel over the chunks of every head, or the pass over time that it is, for the shapes of r and v."""
    (B, T, H, K), V = shapes[0].shape, shapes[1].shape[-1]
    entry = tile(kind, shapes[0].dtype)
    block, keys = block_of(entry.block, V), block_of(entry.keys, K)
    programs = {"state": -(-V // block), "keys": -(-T // chunk) * -(-K // keys)}.get(kind, -(-T // chunk))
    constants: dict[str, Any] = {"T": T, "H": H, "K": K, "C": chunk, "REVERSE": reverse}
    constants |= {"KEYS": keys} if kind in ("out", "keys") else {"KP": padded(K)}
    if kind != "sums":
        constants |= {"V": V, "BLOCK": block, "BONUS": has_bonus, "STAGES": entry.stages, "BOUNDED": T % chunk != 0}
        constants["PRECISION"] = precision(shapes[0].dtype)
    return runtime.launch(
        getattr(kernels, f"{kind}_kernel"),
        *arrays,
        out_shape=[jax.ShapeDtypeStruct(t.shape, t.dtype) for t in out],
        grid=(B * H * programs,),
        num_warps=entry.warps,
        num_stages=entry.stages,
        name=f"linear_attention_{kind}{'_reverse' if reverse else ''}",
        **constants,
    )
