"""Triton scans and convolutions under automatic sharding.

Each device runs its own batch entries and heads. On CPU devices, array code (`plain_*`) replaces the Triton launches
inside the same wrappers. This tests the sharding rules: results and gradients, local operand shapes, and the
collectives in the compiled program. On GPUs the kernels run.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import (
    LowRank,
    ValueMix,
    delta_rule,
    head_norm,
    kda,
    linear_attention,
    log_linear,
    mamba3_operands,
    path_attention,
    path_walk,
    selective_scan,
    short_conv,
    ssd,
    state_scan,
    token_shift,
    wkv7_operands,
)
from kernels_pallas.chunks import from_chunks, join_chunks, split_chunks
from kernels_pallas.delta_rule import xla as delta_rule_xla
from kernels_pallas.head_norm import reference as head_norm_reference
from kernels_pallas.kda import reference as kda_reference
from kernels_pallas.linear_attention import reference as linear_attention_reference
from kernels_pallas.mamba3_operands import reference as rotated_reference
from kernels_pallas.numerics import LOG2_E
from kernels_pallas.path_attention import reference as path_reference
from kernels_pallas.path_walk import reference as walk_reference
from kernels_pallas.selective_scan import xla as selective_scan_xla
from kernels_pallas.short_conv import xla as short_conv_xla
from kernels_pallas.ssd import xla as ssd_xla
from kernels_pallas.state_scan import xla as state_scan_xla
from kernels_pallas.state_scan.api import state_passing
from kernels_pallas.token_shift import reference as token_shift_reference
from kernels_pallas.triton import interpreter, runtime
from kernels_pallas.wkv7_operands import reference as operands_reference
from kernels_pallas.wkv7_operands.interface import Vectors
from tests import extras, support
from tests.kernels.common import ON_GPU, assert_trees_close, fast_jit

AXES = ("data", "fsdp", "tensor")
B, T, H, E, K, V, N = 8, 72, 4, 8, 16, 8, 4  # T leaves a partial last chunk


class Case(NamedTuple):
    """A call `f(*arrays)` with operand and result dims.

    `over_batch` and `over_heads` list the operands with gradients summed over the batch and over heads.
    """

    f: Callable
    arrays: tuple[jax.Array, ...]
    specs: tuple[str, ...]
    out_specs: tuple[str, ...]
    over_batch: tuple[int, ...] = ()
    over_heads: tuple[int, ...] = ()


def arrays_of(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def states() -> Case:
    decay, p, r, s = arrays_of((3, B, H, K), (3, B, H, K, K), (3, B, H, K, V), (B, H, K, V))
    specs = ("c B H k", "c B H k l", "c B H k v", "B H k v")
    f = partial(state_scan, precision=jax.lax.Precision.HIGHEST, implementation="triton")
    return Case(f, (jax.nn.sigmoid(decay), p / 8, r, s), specs, specs[2:])


def passing() -> Case:
    decay, update, initial = arrays_of((B, 3, 1, H, 1), (B, 3, N, H, V), (B, N, H, V))
    specs = ("B c one H one", "B c n H v", "B n H v")
    return Case(partial(state_passing, implementation="triton"), (decay, update, initial), specs, specs[1:])


def channels(*, has_bias: bool = False) -> Case:
    x, dt, a, b, c, d, h = arrays_of((B, T, E), (B, T, E), (E, N), (B, T, N), (B, T, N), (E,), (B, E, N))
    arrays = (x, jax.nn.softplus(dt), -jnp.exp(a), b, c, d, h)
    specs = ("B T H", "B T H", "H n", "B T n", "B T n", "H", "B H n")
    f = partial(selective_scan, implementation="triton")
    if not has_bias:
        return Case(f, arrays, specs, ("B T H", "B H n"), over_batch=(2, 5), over_heads=(3, 4))
    g = lambda *arrays: f(*arrays[:-1], dt_bias_E=arrays[-1])  # noqa: E731
    return Case(
        g, (x, dt, *arrays[2:], d - 1), (*specs, "H"), ("B T H", "B H n"), over_batch=(2, 5, 7), over_heads=(3, 4)
    )


def duality(*, has_dt: bool, per_head: bool = False) -> Case:
    bc = (B, T, H, N) if per_head else (B, T, N)
    x, log_a, b, c, h, dt = arrays_of((B, T, H, V), (B, T, H), bc, bc, (B, H, N, V), (B, T, H))
    arrays = (x / 4, -jax.nn.softplus(log_a), b / 4, c / 4, h, jax.nn.softplus(dt))
    dims = "B T H n" if per_head else "B T n"
    specs = ("B T H v", "B T H", dims, dims, "B H n v", "B T H")
    f, n = partial(ssd, chunk_size=16, implementation="triton"), 6 if has_dt else 5
    return Case(f, arrays[:n], specs[:n], ("B T H v", "B H n v"), over_heads=() if per_head else (2, 3))


def tree() -> Case:
    x, log_a, b, c, m = arrays_of((B, T, H, V), (B, T, H), (B, T, N), (B, T, N), (B, T, H, 6))
    arrays = (x / 4, -jax.nn.softplus(log_a), b / 4, c / 4, jax.nn.softplus(m))
    specs = ("B T H v", "B T H", "B T n", "B T n", "B T H l")
    f = partial(log_linear, chunk_size=16, implementation="triton")
    return Case(lambda *arrays: (f(*arrays),), arrays, specs, specs[:1], over_heads=(2, 3))


def correction(*, has_gate: bool) -> Case:
    q, k, v, beta, s, log_g = arrays_of((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H), (B, H, K, V), (B, T, H))
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    arrays = (q / 4, k, v, jax.nn.sigmoid(beta), -jax.nn.softplus(log_g), s)
    specs = ("B T H k", "B T H k", "B T H v", "B T H", "B T H", "B H k v")
    f = partial(delta_rule, chunk_size=16, implementation="triton")
    if has_gate:
        return Case(f, arrays, specs, ("B T H v", "B H k v"))
    plain = lambda q, k, v, beta, s: f(q, k, v, beta, None, s)  # noqa: E731
    return Case(plain, (*arrays[:4], arrays[5]), (*specs[:4], specs[5]), ("B T H v", "B H k v"))


def channel_decays(kind: str) -> Case:
    k = (B, T, H, K)
    r, k, v, log_w, s, u, a, b = arrays_of(k, k, (B, T, H, V), k, (B, H, K, V), (H, K), k, k)
    arrays = (r / 4, k / 4, v, -jax.nn.softplus(log_w), s)
    specs = ("B T H k", "B T H k", "B T H v", "B T H k", "B H k v")
    f, out = partial(linear_attention, chunk_size=16, implementation="triton"), ("B T H v", "B H k v")
    if kind == "low_rank":
        low = lambda r, k, v, log_w, s, a, b: f(r, k, v, log_w, None, s, low_rank=(a, b))  # noqa: E731
        return Case(low, (*arrays, a / 16, b / 16), (*specs, "B T H k", "B T H k"), out)
    if kind == "correction":
        tied = lambda r, k, v, log_w, s, a: f(r, k, v, log_w, None, s, low_rank=(a, None))  # noqa: E731
        return Case(tied, (*arrays, a / 16), (*specs, "B T H k"), out)
    if kind == "bonus":
        bonus = lambda r, k, v, log_w, s, u: f(r, k, v, log_w, u, s)  # noqa: E731
        return Case(bonus, (*arrays, u), (*specs, "H k"), out, over_batch=(5,))
    return Case(lambda r, k, v, log_w, s: f(r, k, v, log_w, None, s), arrays, specs, out)


def gated_channels(*, per_channel: bool) -> Case:
    k, head = (B, T, H, K), (B, T, H)
    beta, spec = (k, "B T H k") if per_channel else (head, "B T H")
    q, k, v, decay, beta, s, rate, bias = arrays_of(k, k, (B, T, H, V), k, beta, (B, H, K, V), (H,), (H, K))
    arrays = (q / 4, k / 4, v, decay, beta, s, jnp.exp(rate), bias)

    def f(q, k, v, decay, beta, s, rate, bias):
        return kda(q, k, v, decay, beta, s, rate_H=rate, bias_HK=bias, chunk_size=16, implementation="triton")

    specs = ("B T H k", "B T H k", "B T H v", "B T H k", spec, "B H k v", "H", "H k")
    return Case(f, arrays, specs, ("B T H v", "B H k v"), over_batch=(6, 7))


def convolution(*, l2_heads: int | None) -> Case:
    arrays = arrays_of((B, T, E), (E, N), (E,), (B, N - 1, E))
    specs = ("B T H", "H w", "H", "B n H")
    f = partial(short_conv, silu=True, l2_heads=l2_heads, implementation="triton")
    return Case(lambda *arrays: (f(*arrays),), tuple(arrays), specs, specs[:1], over_batch=(1, 2))


def shift() -> Case:
    x, mu, moves, last = arrays_of((B, T, E), (2, E), (2, B, T, E), (B, E))

    def f(x, mu, moves, last):
        return token_shift(x, last, tuple(mu), moves, implementation="triton")

    specs = ("B T H", "n H", "n B T H", "B H")
    return Case(f, (x, mu, moves, last), specs, specs[:1] * 2, over_batch=(1,))


def norm() -> Case:
    data = (B, T, H, V)
    arrays = arrays_of(data, data, data, (B, T, H), (H, V), (H, V))

    def f(x, gate, a, factors, gain, bias):
        return (head_norm(x, gate, (a, factors), gain_HV=gain, bias_HV=bias, eps=1e-5, implementation="triton"),)

    specs = ("B T H v", "B T H v", "B T H v", "B T H", "H v", "H v")
    return Case(f, tuple(arrays), specs, specs[:1], over_batch=(4, 5))


def walking() -> Case:
    specs = ("c B H t k", "c B H t k", "c B H t v", "c B H k l", "c B H t", "c B H t v", "c B H t")
    sizes = {"c": 3, "B": B, "H": H, "t": 16, "k": K, "l": K, "v": V}
    q, k, v, product, *rest = arrays_of(*(tuple(sizes[dim] for dim in spec.split()) for spec in specs))

    def f(*arrays):
        return (path_walk(*arrays[:5], own=arrays[5:], implementation="triton"),)

    return Case(f, (q / 4, k, v, product / 16, *rest), specs, specs[5:6])


def paths() -> Case:
    data = (B, T, H, K)
    q, k, v, w, beta, log_f = arrays_of(data, data, (B, T, H, V), data, (B, T, H), (B, T, H))
    w, beta, log_f = w / jnp.linalg.norm(w, axis=-1, keepdims=True), 2 * jax.nn.sigmoid(beta), -jnp.abs(log_f) / 4

    def f(*arrays):
        return (path_attention(*arrays, chunk_size=16, implementation="triton"),)

    specs = ("B T H k", "B T H k", "B T H v", "B T H k", "B T H", "B T H")
    return Case(f, (q, k, v, w, beta, log_f), specs, specs[2:3])


def prepared() -> Case:
    """Pass vectors as one array and transposed matrices, as XLA sums their gradients."""
    data = (B, T, H, K)
    arrays = arrays_of(data, data, data, data, (6, H, K), *[(B, T, N)] * 3, *[(H * K, N)] * 3)

    def f(r, k, v, first, vectors, *factors):
        k_k, k_a, r_k, *biases = vectors.reshape(6, -1)
        decay, eta, share = (LowRank(factors[i], factors[i + 3].T, bias) for i, bias in enumerate(biases))
        mix, more = ValueMix(first, share, jnp.asarray(False)), {"k_k_D": k_k, "k_a_D": k_a, "r_k_D": r_k}
        made = wkv7_operands(r, k, v, decay=decay, eta=eta, **more, mix=mix, implementation="triton")
        return tuple(jax.tree.leaves(made))

    specs = (*["B T H k"] * 4, "n H k", *["B T r"] * 3, *["H r"] * 3)
    out = (*["B T H k"] * 7, "B T H", "B T H k")
    return Case(f, tuple(arrays), specs, out, over_batch=(4, 8, 9, 10), over_heads=(5, 6, 7))


def rotated() -> Case:
    """Pass both biases as one array, as XLA sums their gradients."""
    shapes = ((B, T, K), (B, T, K), (B, T, N), (B, T, H), (2, H, K), (B, K), (B, H, N))
    b, c, turn, dt, biases, before, start = arrays_of(*shapes)

    def f(b, c, turn, dt, biases, before, start):
        options: Any = {"before_BN": before, "start_BHR": start, "implementation": "triton"}
        return tuple(mamba3_operands(b, c, turn, dt, b_bias_HN=biases[0], c_bias_HN=biases[1], **options))

    specs = ("B T k", "B T k", "B T n", "B T H", "two H k", "B k", "B H n")
    out = ("B T H k", "B T H k", "B T H", "B H n")
    arrays = (b, c, jnp.tanh(turn) / 2, jax.nn.softplus(dt - 3), biases, before, start)
    return Case(f, arrays, specs, out, over_batch=(4,), over_heads=(0, 1, 2, 5))


CASES = {
    "mamba3_operands": rotated,
    "wkv7_operands": prepared,
    "short_conv": partial(convolution, l2_heads=None),
    "short_conv_norm": partial(convolution, l2_heads=H),
    "token_shift": shift,
    "head_norm": norm,
    "path_attention": paths,
    "path_walk": walking,
    "linear_attention": partial(channel_decays, "plain"),
    "linear_attention_bonus": partial(channel_decays, "bonus"),
    "linear_attention_low_rank": partial(channel_decays, "low_rank"),
    "linear_attention_correction": partial(channel_decays, "correction"),
    "kda": partial(gated_channels, per_channel=False),
    "kda_channels": partial(gated_channels, per_channel=True),
    "delta_rule": partial(correction, has_gate=False),
    "gated_delta_rule": partial(correction, has_gate=True),
    "state_scan": states,
    "state_passing": passing,
    "selective_scan": channels,
    "selective_scan_bias": partial(channels, has_bias=True),
    "log_linear": tree,
    "ssd": partial(duality, has_dt=True),
    "ssd_without_dt": partial(duality, has_dt=False),
    "ssd_per_head": partial(duality, has_dt=True, per_head=True),
}


# ------------------------------------------------------------------------- array code in the place of Triton's launches
def plain_products(decay, p, r, s, *, is_single: bool, reverse: bool):
    del is_single
    precision = jax.lax.Precision.HIGHEST
    states, last = state_scan_xla.products(decay, p, r, s[0], precision=precision, reverse=reverse)
    return states, last[None]


def plain_channels(x, dt, a, b, c, d, initial, bias=None, *, keep: bool):
    steps, dt = 64, dt if bias is None else jax.nn.softplus(dt + bias)
    run = partial(selective_scan_xla.forward, chunk_size=8, keep=True)

    def chunk(h, xs):
        x, dt, b, c = xs
        y, h_next, _ = run(x, dt, a / LOG2_E, b, c, d, h)
        return h_next, (y, h)

    xs = [jnp.moveaxis(split_chunks(t, steps), 1, 0) for t in (x, dt, b, c)]
    last, (y, starts) = jax.lax.scan(chunk, initial, tuple(xs))
    y, starts = join_chunks(jnp.moveaxis(y, 0, 1), x.shape[1]), jnp.moveaxis(starts, 0, 1)
    return (y, last, starts) if keep else (y, last)


def plain_channels_backward(x, dt, a, b, c, d, kept, dy, d_last, *bias):
    f = partial(plain_channels, keep=False)
    _, vjp = jax.vjp(f, x, dt, a, b, c, d, kept[:, 0], *bias)
    dx, ddt, da, *rest = vjp((dy, d_last))
    return dx, ddt, da * LOG2_E, *rest  # `a` is the caller's A times LOG2_E


def plain_duality(x, g, dt, b, c, initial, *, has_dt: bool):
    Q = g.shape[-1]

    def chunk(state, xs):
        x, g, dt, b, c = xs
        log_a = jnp.moveaxis(jnp.diff(g, axis=-1, prepend=0), 1, 2)
        y, last = ssd_xla.run(x, log_a, b, c, state, jnp.moveaxis(dt, 1, 2) if has_dt else None, chunk_size=Q)
        return last, (y, state)

    xs = (*(jnp.moveaxis(t, 1, 0) for t in (split_chunks(x, Q), g, dt)), *split_bc(b, c, Q))
    last, (y, states) = jax.lax.scan(chunk, initial, xs)
    return join_chunks(jnp.moveaxis(y, 0, 1), x.shape[1]), last, jnp.moveaxis(states, 0, 1)


def split_bc(b, c, Q):
    return tuple(jnp.moveaxis(split_chunks(t, Q), 1, 0) for t in (b, c))


def plain_duality_backward(x, g, dt, b, c, states, dy, d_last, *, has_dt: bool):
    _, vjp = jax.vjp(lambda *xs: plain_duality(*xs, has_dt=has_dt)[:2], x, g, dt, b, c, states[:, 0])
    dx, dg, ddt, db, dc, d_initial = vjp((dy, d_last))
    return dx, dg, db, dc, d_initial, *([ddt] if has_dt else [])


def plain_tree(x, g, reads, m, b, c):
    """Sum over all pairs, without constant arrays, which a partitioned function may not have.

    Returns zeros as states: the plain backward pass does not need them.
    """
    del reads
    t = jnp.arange(x.shape[1])
    log_a = join_chunks(jnp.moveaxis(jnp.diff(g, axis=-1, prepend=0), 2, 3), len(t))
    m = join_chunks(jnp.moveaxis(m, 4, 2), len(t))
    levels = jnp.minimum(32 - jax.lax.clz(t[:, None] ^ t), m.shape[-1] - 1)
    factor = jnp.take_along_axis(m, jnp.broadcast_to(levels[:, None], (*m.shape[:3], len(t))), axis=-1)
    sums = jnp.moveaxis(jnp.cumsum(log_a, axis=1), 1, 2)
    decay = jnp.exp(jnp.where(t[:, None] >= t, sums[..., None] - sums[..., None, :], -jnp.inf))
    y = jnp.einsum("btn,bsn,bhts,bths,bshv->bthv", c, b, decay, factor, x)
    return y, jnp.zeros((*g.shape[:3], b.shape[-1], x.shape[-1]), x.dtype)


def plain_tree_backward(*arrays):
    *operands, _, dy = arrays
    return jax.vjp(lambda *xs: plain_tree(*xs)[0], *operands)[1](dy)


def plain_correction(q, k, v, beta, g, initial, *, has_gate: bool, keep: bool, passes: None = None):
    assert passes is None
    C = beta.shape[-1]

    def chunk(state, xs):
        q, k, v, beta, g = xs
        log_g = jnp.moveaxis(jnp.diff(g, axis=-1, prepend=0), 1, 2) if has_gate else None
        o, last = delta_rule_xla.run(q, k, v, jnp.moveaxis(beta, 1, 2), log_g, state, chunk_size=C)
        return last, (o, state)

    xs = tuple(jnp.moveaxis(t, 1, 0) for t in (*(split_chunks(t, C) for t in (q, k, v)), beta, g))
    last, (o, states) = jax.lax.scan(chunk, initial, xs)
    within = jnp.zeros((*q.shape[:3], C))  # like W, not read by the gradient below
    kept = (within, within, jnp.moveaxis(states, 0, 1), jnp.zeros_like(v)) if keep else ()
    return join_chunks(jnp.moveaxis(o, 0, 1), q.shape[1]), last, *kept


def plain_correction_backward(q, k, v, beta, g, x, m, states, w, do, d_last, *, has_gate: bool, passes: None):
    del x, m, w
    assert passes is None
    f = partial(plain_correction, has_gate=has_gate, keep=False)
    _, vjp = jax.vjp(f, q, k, v, beta, g, states[:, 0])
    dq, dk, dv, dbeta, dg, d_initial = vjp((do, d_last))
    return dq, dk, dv, dbeta, d_initial, *([dg] if has_gate else [])


def plain_channel_decays(r, k, v, log_w, *rest, way: Any, has_bonus: bool, n_low: int):
    *rest, initial = rest
    u, low, chunk = rest[0] if has_bonus else None, rest[has_bonus:], way.chunk

    def one(state, xs):
        r, k, v, log_w, *low = xs
        a, b = (*low, None, None)[:2]
        o, last = linear_attention_reference.linear_attention(r, k, v, log_w, u, a, b, state)
        return last, (o, state)

    xs = tuple(jnp.moveaxis(split_chunks(t, chunk), 1, 0) for t in (r, k, v, log_w, *low))
    last, (o, states) = jax.lax.scan(one, initial, xs)
    square = jnp.zeros((*v.shape[:3], chunk))  # the saved results are not read below, except log w in place of g
    sums = jnp.pad(log_w, ((0, 0), (0, -log_w.shape[1] % chunk), (0, 0), (0, 0)))
    solved = ((), (square, jnp.zeros_like(v), square, sums), (square, jnp.zeros_like(v)))[n_low]
    return join_chunks(jnp.moveaxis(o, 0, 1), v.shape[1]), last, jnp.moveaxis(states, 0, 1), *solved


def plain_channel_decays_backward(*arrays, n_low: int, **options):
    *arrays, do, d_last = arrays
    if n_low == 1:
        r, k, v, low, states, *_, log_w = arrays
        arrays = [r, k, v, log_w[:, : r.shape[1]], low, states]
    *inputs, states = arrays[: len(arrays) - (0, 0, 2)[n_low]]
    f = partial(plain_channel_decays, n_low=n_low, **options)
    _, vjp = jax.vjp(lambda *xs: f(*xs)[:2], *inputs, states[:, 0])
    return vjp((do, d_last))


def plain_gated(q, k, decay, beta, rate, bias, v, initial, *, chunk: int, lower_bound: None):
    assert lower_bound is None

    def one(q, k, v, decay, beta, rate, bias, initial):  # for one sequence
        rows = (x[None] for x in (q, k, v, decay, beta))
        o, last = kda_reference.kda(*rows, rate, bias, initial[None])
        return o[0], last[0]

    o, last = jax.vmap(one)(q, k, v, decay, beta, rate, bias, initial)
    states = jnp.zeros((len(q), -(-T // chunk), *initial.shape[1:])).at[:, 0].set(initial)
    square, ends = jnp.zeros((*q.shape[:3], chunk)), jnp.zeros(states.shape[:-1])
    return o, last, states, q, q, q, square, square, v, ends  # in place of Z, the gradient below reads v


def plain_gated_backward(
    q, k, decay, beta, rate, bias, states, q_in, a_in, k_out, x, n, v, ends, do, d_last, **options
):
    del q_in, a_in, k_out, x, n, ends
    f = lambda *xs: plain_gated(*xs, **options)[:2]  # noqa: E731
    _, vjp = jax.vjp(f, q, k, decay, beta, rate, bias, v, states[:, 0])
    return vjp((do, d_last))


def plain_convolution(x, w, b, last, *, call, names):
    assert names == ("x", "w", "b", "last")
    options = {"silu": call.silu, "l2_heads": x.shape[2] if call.norm else None, "scale": call.scale, "eps": call.eps}

    def one(x, w, b, last):
        rows = (t.reshape(1, len(t), -1) for t in (x, last))
        x_BTE, last_BWE = rows
        return short_conv_xla.run(x_BTE, w.reshape(-1, N), b.reshape(-1), last_BWE, **options).reshape(x.shape)

    return jax.vmap(one)(x, w, b, last)


def plain_convolution_backward(*arrays, learned, **options):
    assert learned == options["names"]
    return jax.vjp(partial(plain_convolution, **options), *arrays[:-1])[1](arrays[-1])


def plain_shift(x, mu, moves, last, *, names):
    assert names == ("x", "mu", "moves", "last")

    def one(x, mu, moves, last):  # for one sequence
        return token_shift_reference.token_shift(x, last, tuple(mu), moves[:, None])

    return jax.vmap(one, in_axes=1, out_axes=1)(x, mu, moves, last)


def plain_shift_backward(*arrays, learned, **options):
    assert learned == options["names"]
    return jax.vjp(partial(plain_shift, **options), *arrays[:4])[1](arrays[4:])


def plain_operands(*arrays):
    def one(r, k, z_w, z_a, v, first, z_v, vectors):
        rows = [x[None] for x in (r, k, z_w, z_a, v, first, z_v)]
        eye, (k_k, k_a, r_k, *biases) = jnp.eye(r[0].size), vectors.reshape(6, -1)
        decay, eta, share = (
            LowRank(z.reshape(*z.shape[:2], -1), eye, bias)
            for z, bias in zip((rows[2], rows[3], rows[6]), biases, strict=True)
        )
        mix = ValueMix(rows[5], share, jnp.asarray(False))
        made = operands_reference.wkv7_operands(rows[0], rows[1], rows[4], decay, eta, Vectors(k_k, k_a, r_k), mix)
        return [x[0] for x in (made.k_BTHK, made.log_w_BTHK, made.a_BTHK, made.b_BTHK, made.skip[1], made.v_BTHK)]

    return jax.vmap(one)(*arrays)


def plain_operands_backward(*arrays, n):
    data, (d_r, d_k, d_log_w, d_a, d_b, d_bonus, d_v, d_skip, d_first) = arrays[: n + 1], arrays[n + 1 :]
    dr, dk, dz_w, dz_a, dv, dfirst, dz_v, dvectors = jax.vjp(plain_operands, *data)[1](
        [d_k, d_log_w, d_a, d_b, d_bonus, d_v + d_skip]
    )
    return [dr + d_r, dk, dz_w, dz_a, dv, dfirst + d_first, dz_v, dvectors]


def plain_rotated(b, c, turn, dt, biases, before, start):
    def one(b, c, turn, dt, biases, before, start):
        rows = [x[None] for x in (b, c, turn, dt)]
        options: Any = (*rows, *biases, before[None], start[None])
        return [x[0] for x in rotated_reference.mamba3_operands(*options)]

    return jax.vmap(one)(b, c, turn, dt, biases, before, start)


def plain_rotated_backward(*arrays):
    return jax.vjp(plain_rotated, *arrays[:7])[1](list(arrays[7:]))


def plain_norm(*leaves, call, structure):
    x, gate, skip, gain, bias = jax.tree.unflatten(structure, leaves)
    return head_norm_reference.head_norm(x, gate, skip, gain[:, None], bias[:, None], **call._asdict())


def plain_norm_backward(*leaves, **options):
    *leaves, dy = leaves
    return jax.vjp(lambda *xs: plain_norm(*xs, **options), *leaves)[1](dy)


def plain_path(q, k, v, w, beta, forgotten, *, sizes):
    """Return the output, and arrays of zeros for the kept results."""
    (B, T, H, K), C = q.shape, sizes.chunk
    c_BTH = from_chunks(forgotten[..., None], T)[..., 0]
    beta_BTH = join_chunks(jnp.moveaxis(beta, 2, 3), T)
    o = path_reference.path_attention(q, k, v, w, beta_BTH, jnp.diff(c_BTH, axis=1, prepend=0))
    of_chunks = (beta.shape[1], B, H)
    kept = ((B, T, H, C), (*of_chunks, C, K), (*of_chunks, C, K), (*of_chunks, K, K), (*of_chunks, C))
    return (o, *(jnp.zeros(shape) for shape in kept))


def plain_path_backward(*arrays, sizes):
    return jax.vjp(lambda *xs: plain_path(*xs, sizes=sizes)[0], *arrays[:6])[1](arrays[-1])


def plain_walk(*arrays, gates: bool):
    del gates
    *rest, own, lse = arrays
    zeros, ones = jnp.zeros_like(own), jnp.ones_like(own)
    share = walk_reference.path_walk(*rest[:2], zeros, *rest[3:], ones, lse)[..., 0]  # exp(lse - L)
    return walk_reference.path_walk(*arrays), (lse - jnp.log(share)) * LOG2_E


def plain_walk_backward(q, k, v, product, forgotten, do, total, D, *, gates: bool):
    """Return the derivatives of sum p (do . v - D) with p = exp(s - L) and fixed L.

    Its derivative with respect to s equals the derivative of the loss.
    """
    del gates

    def weighed(q, k, v, product, of_query, of_key):
        out = jnp.zeros(())
        for chunk, query in enumerate(q):
            for n in range(chunk)[::-1]:
                s = query @ k[n].mT + of_query[chunk][..., None] - of_key[n][..., None, :]
                p = jnp.exp(s - total[chunk][..., None] / LOG2_E)
                out += jnp.sum(p * (do[chunk] @ v[n].mT - D[chunk][..., None]))
                query = query - query @ product[n]
        return out

    *rest, of_key = jax.grad(weighed, argnums=range(6))(q, k, v, product, forgotten, forgotten)
    return *rest, -of_key


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Replace the launches on CPU devices; return the operand shapes per traced body."""
    seen: list[tuple] = []
    if ON_GPU:
        return seen
    extras.need("triton")
    from kernels_pallas.delta_rule.triton import scan as delta_rule_triton
    from kernels_pallas.head_norm.triton import norm as head_norm_triton
    from kernels_pallas.kda.triton import scan as kda_triton
    from kernels_pallas.linear_attention.triton import scan as linear_attention_triton
    from kernels_pallas.log_linear.triton import scan as log_linear_triton
    from kernels_pallas.mamba3_operands.triton import operands as rotated_triton
    from kernels_pallas.path_attention.triton import attention as path_attention_triton
    from kernels_pallas.path_walk.triton import walk as path_walk_triton
    from kernels_pallas.selective_scan.triton import scan as selective_scan_triton
    from kernels_pallas.short_conv.triton import conv as short_conv_triton
    from kernels_pallas.ssd.triton import scan as ssd_triton
    from kernels_pallas.state_scan.triton import scan as state_scan_triton
    from kernels_pallas.token_shift.triton import shift as token_shift_triton
    from kernels_pallas.wkv7_operands.triton import operands as operands_triton

    def watched(body):
        def f(*arrays, **options):
            shapes = [x.shape for x in arrays]
            # also with heads and channels merged: only the convolution separates them
            seen.append((*shapes, *((*shape[:2], math.prod(shape[2:])) for shape in shapes)))
            return body(*arrays, **options)

        return f

    for module, name, body in (
        (state_scan_triton, "products_share", plain_products),
        (state_scan_triton, "elementwise_share", state_scan_xla.elementwise),
        (selective_scan_triton, "_forward", plain_channels),
        (selective_scan_triton, "_backward", plain_channels_backward),
        (short_conv_triton, "_run_forward", plain_convolution),
        (short_conv_triton, "_run_backward", plain_convolution_backward),
        (log_linear_triton, "_run_forward", plain_tree),
        (log_linear_triton, "_run_backward", plain_tree_backward),
        (ssd_triton, "_run_forward", plain_duality),
        (ssd_triton, "_run_backward", plain_duality_backward),
        (token_shift_triton, "_run_forward", plain_shift),
        (token_shift_triton, "_run_backward", plain_shift_backward),
        (rotated_triton, "_run_forward", plain_rotated),
        (rotated_triton, "_run_backward", plain_rotated_backward),
        (operands_triton, "_run_forward", plain_operands),
        (operands_triton, "_run_backward", plain_operands_backward),
        (head_norm_triton, "_run_forward", plain_norm),
        (head_norm_triton, "_run_backward", plain_norm_backward),
        (path_attention_triton, "_run_forward", plain_path),
        (path_attention_triton, "_run_backward", plain_path_backward),
        (path_walk_triton, "forward", plain_walk),
        (path_walk_triton, "backward", plain_walk_backward),
        (delta_rule_triton, "_run_forward", plain_correction),
        (delta_rule_triton, "_run_backward", plain_correction_backward),
        (kda_triton, "_run_forward", plain_gated),
        (kda_triton, "_run_backward", plain_gated_backward),
        (linear_attention_triton, "_run_forward", plain_channel_decays),
        (linear_attention_triton, "_run_backward", plain_channel_decays_backward),
    ):
        monkeypatch.setattr(module, name, watched(body))
    monkeypatch.setattr(interpreter, "is_chosen", lambda: False)
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    return seen


# ------------------------------------------------------------------------------------------------------------ the tests
def spec_of(dims: str) -> P:
    return P(*({"B": ("data", "fsdp"), "H": "tensor"}.get(dim) for dim in dims.split()))


def with_gradients(case: Case) -> tuple[Callable, tuple[jax.Array, ...]]:
    """Return a function of operands and result gradients, and its arguments."""
    shapes = jax.tree.leaves(jax.eval_shape(case.f, *case.arrays))
    cotangents = tuple(jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in shapes)
    n = len(case.arrays)

    def f(*arrays):
        out, vjp = jax.vjp(case.f, *arrays[:n])
        return out, vjp(arrays[n:])

    return f, (*case.arrays, *cotangents)


def mesh_of(sizes: tuple[int, int, int]) -> jax.sharding.Mesh:
    n = math.prod(sizes)
    if jax.device_count() < n:
        pytest.skip(f"needs {n} devices, here are {jax.device_count()}")
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:n])


MESHES = {"data8": (8, 1, 1), "heads4": (1, 1, 4), "2x2x2": (2, 2, 2)}
GPU_MESHES = {"data2": (2, 1, 1), "heads2": (1, 1, 2), "data4": (4, 1, 1), "fsdp2-heads2": (1, 2, 2)}
# Covers each rule once, with both splits; selective_scan_bias sums over both.
QUICK = {
    (name, "2x2x2")
    for name in (
        "state_scan",
        "state_passing",
        "selective_scan_bias",
        "short_conv_norm",
        "log_linear",
        "ssd_per_head",
        "gated_delta_rule",
        "linear_attention_low_rank",
        "kda",
        "head_norm",
        "path_attention",
        "path_walk",
        "wkv7_operands",
        "mamba3_operands",
    )
}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        *support.slow_unless(lambda *case: case in QUICK, [(name, split) for name in CASES for split in MESHES]),
        *(pytest.param(name, split, marks=pytest.mark.gpu) for name in CASES for split in GPU_MESHES),
    ],
)
def test_every_device_works_on_its_share(name, split, shares) -> None:
    """Values and gradients match a single device and stay sharded.

    The only collectives sum gradients.
    """
    case, mesh = CASES[name](), mesh_of((MESHES | GPU_MESHES)[split])
    f, arrays = with_gradients(case)
    want = jax.tree.map(np.asarray, fast_jit(f)(*arrays))
    specs = [spec_of(dims) for dims in (*case.specs, *case.out_specs)]
    split_arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    shares.clear()
    with jax.set_mesh(mesh):
        # A new function, because a trace of `f` itself is cached.
        compiled = fast_jit(lambda *xs: f(*xs)).lower(*split_arrays).compile()
    got = compiled(*split_arrays)
    for x, dims in zip(jax.tree.leaves(got), (*case.out_specs, *case.specs), strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec_of(dims)), x.ndim), dims
    assert_trees_close(got, want)

    n_batch, n_heads = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["tensor"]
    if shares:
        whole = {x.shape for x in arrays}
        local = {NamedSharding(mesh, spec).shard_shape(x.shape) for x, spec in zip(arrays, specs, strict=True)}
        assert (local - whole) & set(shares[-1]), "no operand of the last body is a device's share"
    summed = (case.over_batch if n_batch > 1 else ()) + (case.over_heads if n_heads > 1 else ())
    shapes = [NamedSharding(mesh, specs[i]).shard_shape(arrays[i].shape) for i in summed]
    collective_shapes = collectives(str(compiled.as_text()))
    assert set(collective_shapes) == ({"all-reduce"} if summed else set()), collective_shapes
    if not ON_GPU:  # on GPUs XLA may combine them
        assert collective_shapes.get("all-reduce", []) == sorted(shapes)


def collectives(program: str) -> dict[str, list[tuple[int, ...]]]:
    """Return the result shapes of collectives in a compiled program, by kind."""
    collective_shapes: dict[str, list[tuple[int, ...]]] = {}
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    for shapes, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", program):
        sizes = [tuple(int(n) for n in dims.split(",") if n) for dims in re.findall(r"\w+\[([\d,]*)\]", shapes)]
        collective_shapes.setdefault(kind, []).extend(sizes)
    return {kind: sorted(sizes) for kind, sizes in collective_shapes.items()}
