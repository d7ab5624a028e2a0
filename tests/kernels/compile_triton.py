"""Compile every Triton kernel for a GPU that need not be present:

    python -m tests.kernels.compile_triton [80] [90] [--kind=all | --quick]

`CASES` lists backend calls. Each call is traced with a recorder instead of `runtime.launch`, for a simulated compute
capability that selects tile sizes, warps and stages. The recorded launches are compiled to machine code. The output has
one line of JSON per kernel: PTX version, shared memory in bytes, registers and spilled bytes per thread. It runs in a
separate process without TRITON_INTERPRET, because `@triton.jit` chooses compiler or interpreter at import.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import device
from kernels_pallas.triton import runtime

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}  # limit per program
TRITON_TYPE = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32", "int8": "*i8"}


class Case(NamedTuple):
    """A backend call; `call(**sizes)` creates its abstract operands."""

    name: str
    call: Callable[..., Any]
    again: bool = False  # another case compiles the same kernels for other sizes
    only: str = ""  # only kernels with this substring in their name


class Recorded(NamedTuple):
    kernel: Any
    dtypes: tuple[str, ...]
    constants: dict[str, Any]
    warps: int
    stages: int


def arrays(f: Callable, *shapes: tuple) -> Any:
    """Trace f on abstract arrays, given as `(shape, dtype)`."""
    return jax.eval_shape(f, *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes))


def element(v_grad: str, *, dim: int, dtype: str) -> None:
    from kernels_pallas.top1_element.triton import attention as backend

    T, H, G = 1000, 4, 2
    q, kv, row = ((1, T, H, dim), dtype), ((1, T, G, dim), dtype), ((1, T, H), "float32")
    index = ((1, T, H), "int32")
    arrays(partial(backend.evaluate, scale=0.1), q, kv, kv)
    arrays(partial(backend.forward, scale=0.1), q, kv, kv)
    arrays(partial(backend.backward, scale=0.1, v_grad=v_grad), q, kv, kv, index, row, q, q)


def gated_attention(*, dim: int, dtype: str, gates: bool = True, packed: bool = False) -> None:
    from kernels_pallas.attention.triton import gated as backend

    T, H, G = 1000, 4, 2
    q, kv, row = ((1, T, H, dim), dtype), ((1, T, G, dim), dtype), ((1, T, H), "float32")

    def run(segments, *operands):
        options = {"segments_BT": segments} if packed else {}
        o, pull = jax.vjp(partial(backend.attend, window=0, scale=0.1, slopes=(), **options), *operands)
        return pull(o)

    arrays(run, ((1, T), "int32"), q, kv, kv, *[row] * gates)


def path_walk(*, dim: int, dtype: str, gates: bool = False) -> None:
    from kernels_pallas.path_walk.triton import walk as backend

    dim = dim // 2 if dim > 64 else dim  # at most 64
    shape = (8, 2, 4, 128)
    data, wide, product, row = ((*shape, dim), dtype), ((*shape, dim), "float32"), (*shape[:3], dim, dim), shape

    def call(q, k, v, product, forgotten, own, lse, do):
        o, pull = jax.vjp(
            lambda *x: backend.run(*x[:4], x[4] if gates else None, *x[5:]), *(q, k, v, product, forgotten, own, lse)
        )
        return o, pull(do)

    arrays(call, wide, data, data, (product, "float32"), (row, "float32"), wide, (row, "float32"), wide)


def path_attention(*, dim: int, dtype: str, gates: bool = False) -> None:
    from kernels_pallas.path_attention.triton import attention as backend

    dim = dim // 2 if dim > 64 else dim  # at most 64
    B, T, H = 2, 1000, 4
    data, wide, row = ((B, T, H, dim), dtype), ((B, T, H, dim), "float32"), ((B, T, H), "float32")

    def call(q, k, v, w, beta, log_f, do):
        o, pull = jax.vjp(
            lambda *x: backend.run(*x[:5], x[5] if gates else None, chunk_size=128), *(q, k, v, w, beta, log_f)
        )
        return o, pull(do)

    arrays(call, data, data, data, wide, row, row, data)


def chunk(*, dim: int, dtype: str, chunk_size: int = 128, packed: bool = False) -> None:
    from kernels_pallas.select_chunk.triton import select as selection_backend
    from kernels_pallas.top1_chunk.triton import attention as backend

    T, H, G = 1000, 4, 2
    q, kv, row = ((1, T, H, dim), dtype), ((1, T, G, dim), dtype), ((1, T, H), "float32")
    sel, options = ((1, T, H), "int32"), {"chunk_size": chunk_size, "scale": 0.1}
    if packed:
        options["segments_BT"] = jnp.zeros((1, T), jnp.int32)
    for selection in ("exact", "best_key", "approx") if packed else ("exact", "best_key", "best_key_int8", "approx"):
        arrays(partial(selection_backend.select, selection=selection, **options), q, kv)
    arrays(partial(backend.forward, **options), q, kv, kv, sel)
    arrays(partial(backend.backward, **options), q, kv, kv, q, row, sel, q)


def several_chunks(
    top_k: int, *, dim: int, dtype: str, chunk_size: int = 128, groups: int = 4, shared: bool = False
) -> None:
    from kernels_pallas.select_chunk.triton import select as selection_backend
    from kernels_pallas.top1_chunk.triton import attention as backend

    T, H = 3000, 4
    q, kv, row = ((1, T, H, dim), dtype), ((1, T, groups, dim), dtype), ((1, T, H), "float32")
    sel, options = ((1, T, groups if shared else H, top_k), "int32"), {"chunk_size": chunk_size, "scale": 0.1}
    arrays(partial(selection_backend.select, selection="approx", top_k=top_k, **options), q, kv)
    arrays(partial(backend.forward, **options), q, kv, kv, sel)
    arrays(partial(backend.backward, **options), q, kv, kv, q, row, sel, q)


def several_selected(top_k: int, *, dim: int, dtype: str, chunk_size: int = 128) -> None:
    from kernels_pallas.select_chunk.triton import select as backend

    q, k = ((1, 3000, 4, dim), dtype), ((1, 3000, 2, dim), dtype)
    for selection in ("exact", "best_key", "best_key_int8"):
        arrays(partial(backend.select, selection=selection, chunk_size=chunk_size, top_k=top_k, scale=0.1), q, k)


def index_loss(*, dim: int, dtype: str, block_size: int = 32, read: int = 8) -> None:
    from kernels_pallas.index_loss.triton import loss as backend

    B, T, H, G = 2, 2048, 12, 3
    index = ((B, T, G, dim), dtype), ((B, T, dim), dtype)
    call = partial(backend.run, block_size=block_size, with_gradients=True)
    arrays(call, *index, ((B, T, H, dim), dtype), ((B, T, G, dim), dtype), ((B, T, G, read - 1), "int32"))


def compressed_attention(*, dim: int, dtype: str, T: int = 2048, block_size: int = 32, top_k: int = 7) -> None:
    from kernels_pallas.compressed_attention.triton import attention as backend

    B, H, G = 2, 12, 3
    q, mean = ((B, T, H, dim), dtype), ((B, T // block_size, G, dim), "float32")

    def call(q, k, v):
        options: Any = {"block_size": block_size, "top_k": top_k}
        (o, sel), pull = jax.vjp(lambda q, k, v: backend.run(q, k, v, None, **options), q, k, v)
        return pull((o, np.zeros(sel.shape, jax.dtypes.float0)))

    arrays(call, q, mean, mean)


def shortlist(table: str, *, dim: int, dtype: str, size: int = 4, chunk_size: int = 128) -> None:
    from kernels_pallas.select_chunk.tables import Shortlist
    from kernels_pallas.select_chunk.triton import select as backend

    options: Any = {"chunk_size": chunk_size, "selection": "shortlist", "shortlist": Shortlist(size, table)}
    # Few chunks: all are scored. Many chunks: rows are sorted by candidate.
    for T in (3000, 1000 + chunk_size * size * backend.FEW_CHUNKS):
        arrays(partial(backend.select, scale=0.1, **options), ((1, T, 4, dim), dtype), ((1, T, 2, dim), dtype))


def decode(kind: str, *, dim: int, dtype: str, top_k: int = 1, table: str = "mean") -> None:
    from kernels_pallas.select_chunk.tables import N_ROWS, Shortlist
    from kernels_pallas.top1_chunk.triton import decode as chunk
    from kernels_pallas.top1_element.triton import decode as element

    B, S, H, G, C = 2, 4000, 4, 2, 128
    q, kv, length, mean = ((B, H, dim), dtype), ((B, S, G, dim), dtype), ((), "int32"), ((B, S // C, G, dim), "float32")
    if kind == "element":
        arrays(element.decode, q, kv, kv, length)
        return
    options: Any = {"chunk_size": C, "selection": kind, "scale": 0.1, "top_k": top_k, "chunk_mean_BcGK": None}
    tables = {"approx": {"chunk_mean_BcGK": mean}}.get(kind, {})
    if kind == "shortlist":
        options["shortlist"] = Shortlist(max(4, top_k), table)
        tables = {"chunk_table_BcGPK": ((B, S // C, G, N_ROWS[table], dim), "float32")}

    def call(q, k, v, length, *operands):
        return chunk.decode(q, k, v, length, **options | dict(zip(tables, operands, strict=True)))

    arrays(call, q, kv, kv, length, *tables.values())


def state_scan(*, dim: int, dtype: str) -> None:
    from kernels_pallas.state_scan.triton import scan as backend

    c, B, H, V = 32, 2, 6, 2 * dim
    precision = jax.lax.Precision.DEFAULT if dtype != "float32" else jax.lax.Precision.HIGHEST
    for entries in (1, dim):
        shapes = [(c, B, H, entries), (c, B, H, dim, dim), (c, B, H, dim, V), (B, H, dim, V)]
        for reverse in (False, True):
            call = partial(backend.products, precision=precision, reverse=reverse)
            arrays(call, *((shape, "float32") for shape in shapes))
    shapes = [(B, c, 1, H, 1), (B, c, 128, H, dim), (B, 128, H, dim)]
    for reverse in (False, True):
        arrays(partial(backend.elementwise, reverse=reverse), *((shape, "float32") for shape in shapes))


def selective_scan(*, dim: int, dtype: str, batch: int = 16, bias: bool = False) -> None:
    from kernels_pallas.selective_scan.triton import scan as backend

    del dim  # there are no heads
    T, E, N = 2000, 1536, 16
    x, dt, bc = ((batch, T, E), dtype), ((batch, T, E), "float32"), ((batch, T, N), dtype)
    a, d = ((E, N), "float32"), ((E,), "float32")
    state, starts = ((batch, E, N), "float32"), ((batch, -(-T // backend.chunk_steps()), E, N), "float32")
    dt, options = (x, {"dt_bias_E": jnp.zeros(E)}) if bias else (dt, {})
    arrays(partial(backend.forward, chunk_size=None, keep=True, **options), x, dt, a, bc, bc, d, state)
    arrays(partial(backend.backward, chunk_size=None, **options), x, dt, a, bc, bc, d, starts, x, state)


def ssd(*, dim: int, dtype: str, batch: int = 2, seq_len: int = 1024, per_head: bool = False) -> None:
    from kernels_pallas.ssd.triton import scan as backend

    B, T, H, N = batch, seq_len, 24, 128
    x, row, state = ((B, T, H, dim), dtype), ((B, T, H), "float32"), ((B, H, N, dim), "float32")
    bc, chunk = ((B, T, *([H] if per_head else []), N), dtype), 64 if per_head else 128  # as in Mamba-3 and Mamba-2

    def call(x, log_a, b, c, initial, dt, *cotangents):
        out, pull = jax.vjp(partial(backend.run, chunk_size=chunk), x, log_a, b, c, initial, dt)
        return out, pull(cotangents)

    arrays(call, x, row, bc, bc, state, row, x, state)


def log_linear(*, dim: int, dtype: str, seq_len: int = 2048) -> None:
    from kernels_pallas.log_linear.triton import scan as backend

    B, T, H, N = 2, seq_len, 24, 128
    x, row, bc = ((B, T, H, dim), dtype), ((B, T, H), "float32"), ((B, T, N), dtype)

    def call(x, log_a, b, c, m, dy):
        y, pull = jax.vjp(partial(backend.run, chunk_size=64), x, log_a, b, c, m)
        return y, pull(dy)

    arrays(call, x, row, bc, bc, ((B, T, H, 12), "float32"), x)


def delta_rule(*, dim: int, dtype: str, gated: bool, batch: int = 2, seq_len: int = 1024) -> None:
    from kernels_pallas.delta_rule.triton import scan as backend

    B, T, H, V = batch, seq_len, 6, dim * (1 + gated)  # values are twice as wide as keys, as in Gated DeltaNet
    k, v, row = ((B, T, H, dim), dtype), ((B, T, H, V), dtype), ((B, T, H), "float32")
    state = ((B, H, dim, V), "float32")

    def call(q, k, v, beta, log_g, initial, *cotangents):
        f = partial(backend.run, chunk_size=64)
        out, pull = jax.vjp(f, q, k, v, beta, log_g if gated else None, initial)
        return out, pull(cotangents)

    arrays(call, k, k, v, row, row, state, v, state)


def cross_entropy(*, dim: int, dtype: str, n_vocab: int) -> None:
    from kernels_pallas.cross_entropy.triton import loss as backend

    del dim  # there are no heads
    call = partial(backend.run, dtype=jnp.dtype(dtype))
    arrays(call, ((2, 100, n_vocab), "float32"), ((2, 100), "int32"), ((2, 100), "float32"))


def short_conv(
    *,
    dim: int,
    dtype: str,
    heads: int | None = None,
    width: int = 4,
    bias: bool = False,
    E: int | None = None,
    documents: bool = False,
) -> None:
    from kernels_pallas.short_conv.triton import conv as backend

    B, T = 2, 1024
    E = E or 24 * dim
    x, w, b, last = ((B, T, E), dtype), ((E, width), "float32"), ((E,), "float32"), ((B, width - 1, E), dtype)

    def call(x, w, b, last, reach, dy):
        options = {"silu": True, "l2_heads": heads, "scale": 0.1, "eps": 1e-6}
        more = (b if bias else None, last if bias else None, reach if documents else None)
        out, pull = jax.vjp(lambda x, w: backend.run(x, w, *more, **options), x, w)
        return out, pull(dy)

    arrays(call, x, w, b, last, ((B, T), "int32"), x)


def head_norm(kind: str, *, dim: int, dtype: str) -> None:
    from kernels_pallas.head_norm.interface import Call
    from kernels_pallas.head_norm.triton import norm as backend

    # Heads as in Gated DeltaNet (values three times as wide as `dim`), RWKV-5 to 7 and Mamba-2; a block's norm
    H = {"gated": 6, "rwkv6": 12, "rwkv7": 12, "mamba2": 24, "residual": 1}[kind]
    B, T, V = 2, 1024, dim * {"gated": 3, "residual": 12}.get(kind, 1)
    data, factors, parameter = ((B, T, H, V), dtype), ((B, T, H), "float32"), ((H, V), "float32")
    call = Call(
        "none" if kind == "rwkv7" else "silu", gate_first=kind == "mamba2", eps=1e-5, with_input=kind == "residual"
    )
    has_bias, has_skip = kind.startswith("rwkv"), kind in ("rwkv7", "mamba2")

    def run(x, gate, skip, factors, gain, bias, dy):
        gated = None if kind == "residual" else gate
        operands = (x, gated, (skip, factors) if has_skip else None, gain, bias if has_bias else None)
        y, pull = jax.vjp(partial(backend.run, call=call), *operands)
        return y, pull((gate, dy) if kind == "residual" else dy)

    arrays(run, data, data, data, factors, parameter, parameter, data)


def token_shift(
    branches: int, *, dim: int, dtype: str, moves: bool = False, last: bool = False, documents: bool = False
) -> None:
    from kernels_pallas.token_shift.triton import shift as backend

    B, T, D = 2, 1024, 12 * dim
    x, mu, moved = ((B, T, D), dtype), ((branches, D), "float32"), ((branches, B, T, D), dtype)

    def call(x, last_BD, mu, moves_NBTD, reach, *dy):
        before, places = last_BD if last else None, reach if documents else None
        f = lambda x, mu, moves: backend.run(x, before, tuple(mu), moves, places)  # noqa: E731
        out, pull = jax.vjp(f, x, mu, moves_NBTD if moves else None)
        return out, pull(dy)

    arrays(call, x, ((B, D), dtype), mu, moved, ((B, T), "int32"), *[x] * branches)


def wkv7_operands(*, dim: int, dtype: str, mix: bool = True) -> None:
    from kernels_pallas.wkv7_operands.interface import LowRank, ValueMix, Vectors
    from kernels_pallas.wkv7_operands.triton import operands as backend

    B, T, H, ranks = 2, 1024, 12, (64, 64, 32)
    data, vector = ((B, T, H, dim), dtype), ((H * dim,), "float32")
    hidden, matrices = [((B, T, n), dtype) for n in ranks], [((n, H * dim), "float32") for n in ranks]

    def call(r, k, v, first, vectors, *factors):
        def f(r, k, v, first, vectors, *factors):
            decay, eta, share = (LowRank(factors[i], factors[i + 3], vectors) for i in range(3))
            values = ValueMix(first, share, jnp.asarray(False)) if mix else None
            return backend.run(r, k, v, decay, eta, Vectors(vectors, vectors, vectors), values)

        out, pull = jax.vjp(f, r, k, v, first, vectors, *factors)
        return out, pull(out)

    arrays(call, data, data, data, data, vector, *hidden, *matrices)


def mamba3_operands(*, dim: int, dtype: str, angles: int = 32) -> None:
    from kernels_pallas.mamba3_operands.triton import operands as backend

    B, T, H, N = 2, 1024, 24, 2 * dim  # 128 states with heads of 64
    data, wide = ((B, T, N), dtype), lambda *shape: (shape, "float32")

    def call(*operands):
        out, pull = jax.vjp(backend.run, *operands)
        return out, pull(out)

    bias, before, start = wide(H, N), ((B, N), dtype), wide(B, H, angles)
    arrays(call, data, data, wide(B, T, angles), wide(B, T, H), bias, bias, before, start)


def linear_attention(
    kind: str, *, dim: int, dtype: str, mild: bool = False, batch: int = 2, seq_len: int = 1024
) -> None:
    from kernels_pallas.linear_attention.triton import scan as backend

    B, T, H, V = batch, seq_len, 6, dim * (2 if kind == "gla" else 1)  # values are twice as wide as keys, as in GLA
    k, v, state = ((B, T, H, dim), dtype), ((B, T, H, V), dtype), ((B, H, dim, V), "float32")

    def call(r, k, v, log_w, u, a, b, initial, *cotangents):
        f = partial(backend.run, chunk_size=64, min_log_w=-math.exp(-0.5) if mild else -math.inf)
        low = {"low_rank": (a, b), "correction": (a, None)}.get(kind, (None, None))
        u = u if kind == "bonus" else None
        out, pull = jax.vjp(f, r, k, v, log_w, u, *low, initial)
        return out, pull(cotangents)

    arrays(call, k, k, v, (k[0], "float32"), ((H, dim), "float32"), k, k, state, v, state)


def kda(*, dim: int, dtype: str, channels: bool = False, batch: int = 16, seq_len: int = 2048) -> None:
    from kernels_pallas.kda.triton import scan as backend

    B, T, H = batch, seq_len, 6
    k, state, row, head = ((B, T, H, dim), dtype), ((B, H, dim, dim), "float32"), (B, T, H), (H,)

    def call(q, k, v, decay, beta, rate, bias, initial, *cotangents):
        f = partial(backend.run, lower_bound=None, chunk_size=64)
        out, pull = jax.vjp(f, q, k, v, decay, beta, rate, bias, initial)
        return out, pull(cotangents)

    beta = k if channels else (row, "float32")
    arrays(call, k, k, k, k, beta, (head, "float32"), ((*head, dim), "float32"), state, k, state)


LONG = {"batch": 1, "seq_len": 102_400}  # a single sequence: passes over time are split into segments
PASSES: Any = {"again": True, "only": "state_kernel"}
CASES = [
    Case("linear-attention-low-rank", partial(linear_attention, "low_rank", mild=True)),  # RWKV-7
    Case("linear-attention-any-decay", partial(linear_attention, "low_rank"), again=True),
    Case("linear-attention-correction", partial(linear_attention, "correction")),  # KDA
    Case("linear-attention-bonus", partial(linear_attention, "bonus"), again=True),
    Case("linear-attention", partial(linear_attention, "gla"), again=True),
    Case("linear-attention-in-segments", partial(linear_attention, "low_rank", mild=True, **LONG), **PASSES),
    Case("linear-attention-bonus-in-segments", partial(linear_attention, "bonus", **LONG), **PASSES),
    Case(
        "linear-attention-correction-in-segments", partial(linear_attention, "correction", **LONG), True, "pass_kernel"
    ),
    Case("kda", kda),
    Case("kda-channels", partial(kda, channels=True), again=True),  # Gated DeltaNet-2
    Case("short-conv", partial(short_conv, bias=True)),  # as in Mamba
    Case("short-conv-96", partial(short_conv, heads=6, E=576), again=True),  # as q and k in Gated DeltaNet
    Case("short-conv-192", partial(short_conv, heads=6, E=1152), again=True),
    Case("short-conv-documents", partial(short_conv, heads=6, E=576, documents=True), again=True),
    Case("short-conv-1", partial(short_conv, width=1, E=100), again=True),
    Case("cross-entropy", partial(cross_entropy, n_vocab=32000)),
    Case("cross-entropy-50257", partial(cross_entropy, n_vocab=50257), again=True),
    Case("cross-entropy-262144", partial(cross_entropy, n_vocab=262144), again=True),
    Case("head-norm-rwkv7", partial(head_norm, "rwkv7")),
    Case("head-norm-rwkv6", partial(head_norm, "rwkv6"), again=True),
    Case("head-norm-gated", partial(head_norm, "gated"), again=True),
    Case("head-norm-mamba2", partial(head_norm, "mamba2"), again=True),
    Case("head-norm-residual", partial(head_norm, "residual"), again=True),
    Case("token-shift-6", partial(token_shift, 6)),  # RWKV-7
    Case("token-shift-moved", partial(token_shift, 5, moves=True), again=True),  # RWKV-6
    Case("token-shift-1", partial(token_shift, 1, last=True), again=True),  # ChannelMix
    Case("token-shift-documents", partial(token_shift, 6, documents=True), again=True),
    Case("token-shift-moved-documents", partial(token_shift, 5, moves=True, documents=True), again=True),
    Case("wkv7-operands", wkv7_operands),
    Case("wkv7-operands-first-layer", partial(wkv7_operands, mix=False), again=True),
    Case("mamba3-operands", mamba3_operands),
    Case("mamba3-operands-64", partial(mamba3_operands, angles=64), again=True),  # all channels rotated
    Case("gated-delta-rule", partial(delta_rule, gated=True)),
    Case("delta-rule", partial(delta_rule, gated=False), again=True),
    Case("delta-rule-16", partial(delta_rule, gated=True, batch=16), again=True),  # outputs in the pass over time
    Case("delta-rule-in-segments", partial(delta_rule, gated=True, **LONG), **PASSES),
    Case("path-attention", path_attention),
    Case("path-attention-gates", partial(path_attention, gates=True), again=True),
    Case("path-walk", path_walk),
    Case("path-walk-gates", partial(path_walk, gates=True), again=True),
    Case("ssd", ssd),
    Case("ssd-per-head", partial(ssd, per_head=True), again=True),
    Case("ssd-in-segments", partial(ssd, batch=1, seq_len=8192), again=True),
    Case("log-linear", log_linear),
    Case("log-linear-long", partial(log_linear, seq_len=32768), again=True),
    Case("log-linear-short", partial(log_linear, seq_len=32), again=True),  # columns of a chunk in several warps
    Case("state-scan", state_scan),
    Case("selective-scan", selective_scan, again=True),
    Case("selective-scan-1", partial(selective_scan, batch=1, bias=True)),
    Case("selective-scan-bias", partial(selective_scan, bias=True), again=True),  # as in Mamba-1
    Case("chunk", chunk),
    Case("chunk-packed", partial(chunk, packed=True)),
    Case("chunk-256", partial(chunk, chunk_size=256), again=True),
    Case("chunk-top-2", partial(several_chunks, 2), again=True),  # as in MoBA
    Case("chunk-top-7", partial(several_chunks, 7, chunk_size=32, groups=1), again=True),  # as in NSA
    Case("chunk-top-7-shared", partial(several_chunks, 7, chunk_size=32, groups=1, shared=True), again=True),  # MSA
    Case("chunk-top-16", partial(several_chunks, 16, chunk_size=64), again=True),
    Case("select-top-2", partial(several_selected, 2), again=True),
    Case("select-top-4", partial(several_selected, 4), again=True),
    Case("select-top-8", partial(several_selected, 8), again=True),
    Case("select-top-16", partial(several_selected, 16, chunk_size=64), again=True),
    Case("index-loss", index_loss),  # as in MSA up to 2,048 tokens
    Case("index-loss-128", partial(index_loss, block_size=128, read=16), again=True),
    Case("compressed-attention", compressed_attention),  # as in NSA up to 2,048 tokens, and above
    Case("compressed-attention-long", partial(compressed_attention, T=8192, block_size=64, top_k=15)),
    Case("shortlist", partial(shortlist, "mean")),
    Case("shortlist-sub-means", partial(shortlist, "sub_means"), again=True),
    Case("shortlist-mean-eigen", partial(shortlist, "mean_eigen"), again=True),
    Case("shortlist-256", partial(shortlist, "mean", size=2, chunk_size=256), again=True),
    Case("shortlist-16", partial(shortlist, "mean_eigen", size=16, chunk_size=40), again=True),
    Case("chunk-decode-exact", partial(decode, "exact")),
    Case("chunk-decode-best-key", partial(decode, "best_key")),
    Case("chunk-decode-approx", partial(decode, "approx")),
    Case("chunk-decode-shortlist", partial(decode, "shortlist")),
    Case("chunk-decode-sub-means", partial(decode, "shortlist", table="sub_means", top_k=16), again=True),
    Case("chunk-decode-mean-eigen", partial(decode, "shortlist", table="mean_eigen", top_k=2), again=True),
    Case("chunk-decode-exact-8", partial(decode, "exact", top_k=8), again=True),
    Case("chunk-decode-best-key-16", partial(decode, "best_key", top_k=16), again=True),
    Case("chunk-decode-approx-2", partial(decode, "approx", top_k=2), again=True),
    Case("element-decode", partial(decode, "element")),
    Case("element", partial(element, "hard")),
    Case("element-soft", partial(element, "soft")),
    Case("gated-attention", gated_attention),
    Case("packed-attention", partial(gated_attention, gates=False, packed=True)),
    Case("packed-attention-gates", partial(gated_attention, packed=True), again=True),
]


def record(case: Case, capability: int, **sizes: Any) -> list[Recorded]:
    """Return the launches in a case for a GPU with this compute capability."""
    seen: list[Recorded] = []

    def recorder(kernel, *operands, out_shape, grid, num_warps=4, num_stages=2, name="", **constants):
        del grid, name
        dtypes = tuple(jnp.dtype(x.dtype).name for x in (*operands, *out_shape))
        seen.append(Recorded(kernel, dtypes, constants, num_warps, num_stages))
        return tuple(jnp.zeros(x.shape, x.dtype) for x in out_shape)

    jax.clear_caches()  # a cached trace would launch nothing
    launch, compute_capability = runtime.launch, device.compute_capability
    runtime.launch, device.compute_capability = recorder, lambda: capability
    try:
        case.call(**sizes)
    finally:
        runtime.launch, device.compute_capability = launch, compute_capability
    return seen


def resources(ptx: str, arch: int) -> tuple[int, int]:
    """Return registers and spilled bytes per thread, from the assembler's report."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        suffix = "a" if arch == 90 else ""
        command = [
            get_ptxas(arch).path,  # Triton 3.9 uses a separate assembler for sm_90
            "-v",
            f"--gpu-name=sm_{arch}{suffix}",
            source,
            "-o",
            source.with_suffix(".o"),
        ]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores", report)
    return int(registers[1]) if registers else 0, int(spilled[1]) if spilled else 0


def compiled(launch: Recorded, capability: int) -> dict[str, Any]:
    """Compile a recorded launch as in jax_triton.

    Pointers are aligned to 16 bytes, everything else is constexpr.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    signature = {name: TRITON_TYPE[dtype] for name, dtype in zip(names, launch.dtypes, strict=False)}
    signature |= dict.fromkeys(launch.constants, "constexpr")
    assert set(signature) == set(names), f"{launch.kernel.__name__}: {set(signature) ^ set(names)}"
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(len(launch.dtypes))}
    source = ASTSource(launch.kernel, signature, constexprs=launch.constants, attrs=attributes)
    options = {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spilled = resources(binary.asm["ptx"], capability)
    version = re.search(r"^\.version (\d+)\.(\d+)", binary.asm["ptx"], re.MULTILINE)
    assert version, "the PTX names no version"
    ptx = [int(part) for part in version.groups()]
    return {"ptx": ptx, "shared": binary.metadata.shared, "registers": registers, "spilled": spilled}


# dtype and dim; fp32 is only for tests
KINDS = (("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 96), ("float32", 64), ("float32", 128))


def kind_name(kind: tuple[str, int]) -> str:
    """Return the command-line name of a dtype and dim."""
    return "-".join(map(str, kind))


def every(
    capabilities: list[int], *, kinds: Sequence[tuple[str, int]], named: str = "", quick: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield a report per distinct kernel for the (dtype, dim) pairs in `kinds`.

    Kernels that an earlier entry of `KINDS` covers are skipped. `quick` compiles each kernel once, with one set of
    constants.
    """
    cases = [case for case in CASES if named in case.name and not (quick and case.again)]
    for capability in capabilities:
        done = set()
        for kind, dim in KINDS[: max(KINDS.index(kind) for kind in kinds) + 1]:
            for case in cases:
                for launch in record(case, capability, dim=dim, dtype=kind):
                    key = (launch.kernel.__module__, launch.kernel.__name__)
                    if not quick:
                        key = (*key, launch.dtypes, tuple(sorted(launch.constants.items())))
                    if key in done or case.only not in launch.kernel.__name__:
                        continue
                    done.add(key)
                    if (kind, dim) not in kinds:
                        continue
                    where = {"kernel": launch.kernel.__name__, "case": case.name, "capability": capability}
                    shape = {"dtype": kind, "dim": dim, "warps": launch.warps, "stages": launch.stages}
                    yield where | shape | compiled(launch, capability)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("capabilities", nargs="*", type=int, default=[80, 90])
    parser.add_argument("--kind", default="bfloat16-64", help=f"all, or one of {', '.join(map(kind_name, KINDS))}")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="each kernel once")
    arguments = parser.parse_args()
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter has nothing to compile"
    kinds = [kind for kind in KINDS if arguments.kind in ("all", kind_name(kind))]
    for report in every(arguments.capabilities, kinds=kinds, named=arguments.case, quick=arguments.quick):
        sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
