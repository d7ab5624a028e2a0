"""The delta rule's input gradients as one Pallas kernel for Hopper's matrix units.

    operand                shape             dtype          meaning
    q, k, dq, dk           [B, T, H, K]      bf16 or fp16   queries, keys and their gradients; T in whole chunks
    v, w, do, dy, dv       [B, T, H, V]      as q           values, W, output gradient, dY, value gradient
    states, dstates        [B, c, H, K, V]   as q           states S before, and state gradients L after, each chunk
    beta, g, dbeta, dg     [B, c, H, C]      fp32           step sizes, summed log decays and their gradients

    Z = (dO W^T) * G,  j <= i      dQ = Z K + e^g dO S^T
    M = -(dY W^T) * G,  j < i      dK = beta (M K - e^g dY S^T) + Z^T Q + (beta M)^T K + e^{g_C - g} W L^T
    N = Z * Q K^T + beta M * K K^T
    dg = rowsum(N) - colsum(N) + rowsum(Q * e^g dO S^T) - rowsum(K * (beta e^g dY S^T + e^{g_C - g} W L^T))
    dbeta = rowsum(dY * V) - rowsum(K * e^g dY S^T) + rowsum(M * K K^T)

Equations: `delta_rule/api.py`. dg sums the rows and columns of one float32 N, so the contributions that cancel are
equal. Two warpgroups compute, because the accumulators exceed the registers of one:

    pairs   dO W^T, dY W^T, then K K^T, Q K^T: Z, M, N, dg and dbeta; dv and <S, L>
    keys    dO S^T, dY S^T, W L^T, then the products with Z and M: dq, dk

A third warpgroup copies ROWS value channels at a time into a ring in shared memory. A program takes many chunks, so
the next chunk arrives while the last products of a chunk run. An output leaves through the place of its operand.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import device, mosaic_gpu
from kernels_pallas.delta_rule.mosaic_gpu.kernel import (
    ROWS,
    SHARED,
    added_to,
    load,
    start_product,
    wait_for,
    with_zeros,
)

MULTIPROCESSORS = 132  # of an H100 SXM and an H200, if there is no GPU to ask; a program fills one
REGISTERS = {"compute": 232, "copy": 40}  # of a thread; at launch 168, and the sum over three warpgroups is the same
REDUCTION = 2048  # bytes that Pallas reserves for sums across warps


class Sizes(NamedTuple):
    """The static arguments of the kernel."""

    B: int
    H: int
    K: int
    V: int
    C: int
    chunks: int
    dtype: Any
    gate: bool  # compute dg
    interpret: bool
    programs: int

    @property
    def blocks(self) -> int:
        """Return the blocks of ROWS value channels."""
        return self.V // ROWS

    @property
    def items(self) -> int:
        """Return the chunks of all heads."""
        return self.B * self.chunks * self.H

    @property
    def stages(self) -> int:
        """Return the blocks in the ring: as many as fit, at most 4."""
        return min(4, self._free_bytes // self._block_bytes)

    @property
    def keys(self) -> int:
        """Return the chunks with a place for q and k: 2 if they fit beside the ring."""
        return 1 + (self.C * self.dtype.itemsize * 2 * self.K <= self._free_bytes - self.stages * self._block_bytes)

    @property
    def _block_bytes(self) -> int:
        return ROWS * self.dtype.itemsize * (4 * self.C + 2 * self.K) + 2 * self.C * 4

    @property
    def _free_bytes(self) -> int:
        """Return the shared memory for the ring if q and k have one place."""
        matrices = self.C * self.dtype.itemsize * (2 * self.K + 2 * self.C + ROWS)
        return SHARED - matrices - 6 * self.C * 4 - REDUCTION - 1024


def scratch(n: Sizes) -> list:
    """Return the kernel's shared memory and barriers.

    Memory: the ring of w, do, dy, v, states, dstates and vectors; q, k, Z and beta M of a chunk; dv on its way out;
    vectors that the two warpgroups add. Barriers: see `Refs`.
    """

    def tiled(*shape: int, width: int = 64) -> Any:
        transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * n.dtype.itemsize)
        return plgpu.SMEM(shape, n.dtype, transforms=transforms)

    keys = tiled(n.keys, n.C, n.K, width=64 if n.K % 64 == 0 else 32)
    values, states = tiled(n.stages, n.C, ROWS), tiled(n.stages, n.K, ROWS)
    return [
        *[values] * 4,
        *[states] * 2,
        plgpu.SMEM((n.stages, 2, n.C), jnp.float32),
        *(keys, keys, tiled(n.C, n.C), tiled(n.C, n.C), tiled(n.C, ROWS)),
        plgpu.SMEM((6, n.C), jnp.float32),
        plgpu.Barrier(num_arrivals=8, num_barriers=n.stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=n.stages),
        plgpu.Barrier(num_arrivals=2, num_barriers=n.keys),
        plgpu.Barrier(num_barriers=n.keys),
        *[plgpu.Barrier()] * 3,
    ]


class Refs(NamedTuple):
    """The kernel's arrays, shared memory and barriers."""

    q: Any
    k: Any
    v: Any
    w: Any
    beta: Any
    g: Any
    states: Any
    do: Any
    dy: Any
    dstates: Any
    dq: Any
    dk: Any
    dv: Any
    dbeta: Any
    dg: Any
    w_smem: Any
    do_smem: Any
    dy_smem: Any
    v_smem: Any
    s_smem: Any
    l_smem: Any
    vectors: Any
    q_smem: Any
    k_smem: Any
    z_smem: Any
    m_smem: Any
    dv_smem: Any
    sums: Any  # parts of dbeta, dg and dg's end from `keys`, column sums, dbeta, dg
    there: Any  # a block has arrived
    free: Any  # both warpgroups have read a block
    keys_there: Any  # q and k have arrived
    keys_free: Any  # dq and dk have left
    pairs_there: Any  # Z and M are written
    pairs_free: Any  # Z and M are read
    sums_there: Any  # the parts of `keys` are written


def kernel(*refs: Any, n: Sizes) -> None:
    """Write dq, dk, dv, dbeta and, with `gate`, dg. Program p takes chunks p, p + programs, ... of all heads."""
    r = Refs(*refs)
    program, group = lax.axis_index("program"), lax.axis_index("group")
    count = lax.div(n.items - 1 - program, n.programs) + 1

    def at(item: Array) -> tuple[Array, Array, Array]:
        """Return (b, c, h). Programs take all heads of a chunk together, which are neighbours in memory."""
        i = program + item * n.programs
        return lax.div(i, n.H * n.chunks), lax.rem(lax.div(i, n.H), n.chunks), lax.rem(i, n.H)

    @pl.when(group == 0)
    def _pairs() -> None:
        _set_registers("compute", n)

        @pl.loop(0, count)
        def _(item: Array) -> None:
            _pairs_of(item, at(item), r=r, n=n)

        plgpu.barrier_wait(r.pairs_free)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(group == 1)
    def _keys() -> None:
        _set_registers("compute", n)

        @pl.loop(0, count)
        def _(item: Array) -> None:
            _keys_of(item, at(item), r=r, n=n)

        _release_keys(count - 1, r=r, n=n)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(group == 2)
    def _copy() -> None:
        _set_registers("copy", n)

        @pl.loop(0, count)
        def _(item: Array) -> None:
            b, c, h = at(item)
            rows = pl.ds(c * n.C, n.C)
            for block in range(n.blocks):
                step = item * n.blocks + block
                slot, channels = lax.rem(step, n.stages), pl.ds(block * ROWS, ROWS)
                there = r.there.at[slot]
                pl.when(step >= n.stages)(partial(plgpu.barrier_wait, r.free.at[slot]))
                for source, target in ((r.do, r.do_smem), (r.dy, r.dy_smem), (r.w, r.w_smem), (r.v, r.v_smem)):
                    plgpu.copy_gmem_to_smem(source.at[b, rows, h, channels], target.at[slot], there)
                for source, target in ((r.states, r.s_smem), (r.dstates, r.l_smem)):
                    plgpu.copy_gmem_to_smem(source.at[b, c, h, :, channels], target.at[slot], there)
                for i, source in enumerate((r.beta, r.g)):
                    plgpu.copy_gmem_to_smem(source.at[b, c, h], r.vectors.at[slot, i], there)
            place = lax.rem(item, n.keys)
            pl.when(item >= n.keys)(partial(plgpu.barrier_wait, r.keys_free.at[place]))
            for source, target in ((r.q, r.q_smem), (r.k, r.k_smem)):
                plgpu.copy_gmem_to_smem(source.at[b, rows, h], target.at[place], r.keys_there.at[place])

        @pl.loop(jnp.maximum(count * n.blocks - n.stages, 0), count * n.blocks)
        def _(step: Array) -> None:  # waits for every barrier phase, as the interpreter requires
            plgpu.barrier_wait(r.free.at[lax.rem(step, n.stages)])

        @pl.loop(jnp.maximum(count - n.keys, 0), count)
        def _(item: Array) -> None:
            plgpu.barrier_wait(r.keys_free.at[lax.rem(item, n.keys)])


def _set_registers(role: str, n: Sizes) -> None:
    if not n.interpret:
        plgpu.set_max_registers(REGISTERS[role], action="increase" if role == "compute" else "decrease")


def _zero(item: Array, n: Sizes) -> Array:
    """Return 0, which the compiler does not know.

    With a place that is the same for every chunk, the compiler computes the addresses of all products once, runs out of
    registers, and reads the addresses from memory before each product.
    """
    return lax.div(item, n.items)


def _slot(item: Array, block: int, n: Sizes) -> Array:
    """Return the place of a block in the ring."""
    return lax.rem(item * n.blocks + block + _zero(item, n), n.stages)


def _row(x_C: Array, shape: tuple[int, ...]) -> Array:
    """Return x_C[i] in row i."""
    return lax.broadcast_in_dim(x_C, shape, (0,))


def _rows_of(ref: Any) -> Array:
    """Load a vector with an entry per row of a matrix."""
    return load(ref, layout=plgpu.Layout.WGMMA.reduce(1))


def _wide(ref: Any) -> Array:
    """Load a matrix in float32."""
    return load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def _pairs_of(item: Array, at: tuple[Array, Array, Array], *, r: Refs, n: Sizes) -> None:
    """Compute Z, M and dv, dbeta, dg of a chunk."""
    (b, c, h), pairs = at, (n.C, n.C)
    place = lax.rem(item, n.keys) + _zero(item, n)
    q_smem, k_smem = r.q_smem.at[place], r.k_smem.at[place]

    def across_values(z_acc: Any, m_acc: Any) -> tuple[Array, ...]:
        dbeta_C, overlap_R = (plgpu.layout_cast(jnp.zeros((ROWS,)), plgpu.Layout.WGMMA.reduce(1)) for _ in range(2))
        for block in range(n.blocks):
            slot = _slot(item, block, n)
            plgpu.barrier_wait(r.there.at[slot])
            w_VC = mosaic_gpu.transposed(r.w_smem.at[slot])
            start_product(z_acc, r.do_smem.at[slot], w_VC)
            start_product(m_acc, r.dy_smem.at[slot], w_VC)
            if n.gate:
                s_VK, l_VK = (_wide(mosaic_gpu.transposed(ref.at[slot])) for ref in (r.s_smem, r.l_smem))
                overlap_R += jnp.sum(s_VK * l_VK, axis=1)
            dy_CV = _wide(r.dy_smem.at[slot])
            dbeta_C += jnp.sum(dy_CV * _wide(r.v_smem.at[slot]), axis=1)
            beta_C = _rows_of(r.vectors.at[slot, 0])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            r.dv_smem[...] = (dy_CV * _row(beta_C, dy_CV.shape)).astype(n.dtype)
            plgpu.commit_smem()
            to = r.dv.at[b, pl.ds(c * n.C, n.C), h, pl.ds(block * ROWS, ROWS)]
            plgpu.copy_smem_to_gmem(r.dv_smem, to)
            if block < n.blocks - 1:
                if not n.interpret:
                    plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(r.free.at[slot])
        return wait_for(z_acc, 0), wait_for(m_acc, 0), dbeta_C, overlap_R

    z_CC, m_CC, dbeta_C, overlap_R = with_zeros(across_values, pairs, pairs, n=n)
    slot = _slot(item, n.blocks - 1, n)
    beta_C, g_row_C = (_rows_of(r.vectors.at[slot, i]) for i in range(2))
    g_column_C = load(r.vectors.at[slot, 1], layout=plgpu.Layout.WGMMA.reduce(0))
    overlap_R *= jnp.exp(lax.broadcast(r.vectors[slot, 1, n.C - 1], (ROWS,)))
    plgpu.barrier_arrive(r.free.at[slot])
    later, earlier = (plgpu.broadcasted_iota(jnp.int32, pairs, i, layout=plgpu.Layout.WGMMA) for i in range(2))
    gap_CC = _row(g_row_C, pairs) - lax.broadcast_in_dim(g_column_C, pairs, (1,))
    decays_CC = jnp.exp(jnp.where(later >= earlier, gap_CC, -jnp.inf))
    z_CC = z_CC * decays_CC
    m_CC = jnp.where(later > earlier, -m_CC * decays_CC, 0.0)
    beta_m_CC = m_CC * _row(beta_C, pairs)
    pl.when(item > 0)(partial(plgpu.barrier_wait, r.pairs_free))
    r.z_smem[...] = z_CC.astype(n.dtype)
    r.m_smem[...] = beta_m_CC.astype(n.dtype)
    plgpu.commit_smem()

    plgpu.barrier_wait(r.keys_there.at[lax.rem(item, n.keys)])
    k_KC = mosaic_gpu.transposed(k_smem)

    def across_keys(k_acc: Any, q_acc: Any) -> tuple[Array, ...]:
        start_product(k_acc, k_smem, k_KC)
        start_product(q_acc, q_smem, k_KC)
        return wait_for(k_acc, 0), wait_for(q_acc, 0)

    kk_CC, qk_CC = with_zeros(across_keys, pairs, pairs, n=n)
    plgpu.barrier_arrive(r.pairs_there)  # also: q and k may be overwritten
    dbeta_C += jnp.sum(m_CC * kk_CC, axis=1)
    n_CC = z_CC * qk_CC + beta_m_CC * kk_CC
    plgpu.barrier_wait(r.sums_there)
    r.sums.at[4][...] = dbeta_C + _rows_of(r.sums.at[0])
    if n.gate:
        end_C = overlap_R + _rows_of(r.sums.at[2])
        columns_CC = jnp.where(earlier == n.C - 1, n_CC - _row(end_C, pairs), n_CC)
        r.sums.at[3][...] = jnp.sum(columns_CC, axis=0)
        plgpu.commit_smem()
        r.sums.at[5][...] = jnp.sum(n_CC, axis=1) + _rows_of(r.sums.at[1]) - _rows_of(r.sums.at[3])
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(r.sums.at[4], r.dbeta.at[b, c, h])
    if n.gate:
        plgpu.copy_smem_to_gmem(r.sums.at[5], r.dg.at[b, c, h])


def _release_keys(item: Array, *, r: Refs, n: Sizes) -> None:
    """Free the place of q and k, which dq and dk have left."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(r.keys_free.at[lax.rem(item, n.keys)])


def _keys_of(item: Array, at: tuple[Array, Array, Array], *, r: Refs, n: Sizes) -> None:
    """Compute dq and dk of a chunk."""
    (b, c, h), shape = at, (n.C, n.K)
    place = lax.rem(item, n.keys) + _zero(item, n)
    q_smem, k_smem = r.q_smem.at[place], r.k_smem.at[place]

    def across_values(q_acc: Any, s_acc: Any, l_acc: Any) -> tuple[Array, ...]:
        for block in range(n.blocks):
            slot = _slot(item, block, n)
            plgpu.barrier_wait(r.there.at[slot])
            s_VK, l_VK = (mosaic_gpu.transposed(ref.at[slot]) for ref in (r.s_smem, r.l_smem))
            start_product(q_acc, r.do_smem.at[slot], s_VK)
            start_product(s_acc, r.dy_smem.at[slot], s_VK)
            start_product(l_acc, r.w_smem.at[slot], l_VK)
            if block == 0:
                pl.when(item > 0)(partial(_release_keys, item - 1, r=r, n=n))
            if block > 0:  # the products of the block before are finished
                if not n.interpret:
                    plgpu.wgmma_wait(3)
                plgpu.barrier_arrive(r.free.at[_slot(item, block - 1, n)])
        return wait_for(q_acc, 0), wait_for(s_acc, 0), wait_for(l_acc, 0)

    dq_CK, dk_CK, late_CK = with_zeros(across_values, shape, shape, shape, n=n)
    slot = _slot(item, n.blocks - 1, n)
    beta_C, g_C = (_rows_of(r.vectors.at[slot, i]) for i in range(2))
    end_C = jnp.exp(lax.broadcast(r.vectors[slot, 1, n.C - 1], (n.C,)) - g_C)
    plgpu.barrier_arrive(r.free.at[slot])
    grow_C = jnp.exp(g_C)

    plgpu.barrier_wait(r.keys_there.at[lax.rem(item, n.keys)])
    k_CK = _wide(k_smem)
    dq_CK = dq_CK * _row(grow_C, shape)
    seen_C = jnp.sum(k_CK * dk_CK, axis=1) * grow_C
    late_CK = late_CK * _row(end_C, shape)
    late_C = jnp.sum(k_CK * late_CK, axis=1)
    dk_CK = late_CK - dk_CK * _row(beta_C * grow_C, shape)
    dg_C = jnp.sum(_wide(q_smem) * dq_CK, axis=1) - beta_C * seen_C - late_C

    plgpu.barrier_wait(r.pairs_there)
    for i, x_C in enumerate((-seen_C, dg_C, late_C)):
        r.sums.at[i][...] = x_C
    plgpu.commit_smem()
    plgpu.barrier_arrive(r.sums_there)

    def within_chunk(q_acc: Any, k_acc: Any) -> None:
        for source, q_or_k, acc in ((r.z_smem, k_smem, q_acc), (r.m_smem, k_smem, k_acc)):
            start_product(acc, load(source, layout=plgpu.Layout.WGMMA), q_or_k)
        for source, q_or_k in ((r.z_smem, q_smem), (r.m_smem, k_smem)):
            start_product(k_acc, load(mosaic_gpu.transposed(source), layout=plgpu.Layout.WGMMA), q_or_k)

    dq_CK, dk_CK = added_to(within_chunk, dq_CK, dk_CK, n=n)
    plgpu.barrier_arrive(r.pairs_free)
    rows = pl.ds(c * n.C, n.C)
    for x_CK, smem, target in ((dq_CK, q_smem, r.dq), (dk_CK, k_smem, r.dk)):
        smem[...] = x_CK.astype(n.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, target.at[b, rows, h])


@partial(jax.jit, static_argnames=("programs", "interpret"))  # layers share it, as in kernel.py
def gradients(
    q: Array,
    k: Array,
    v: Array,
    w: Array,
    beta_BcHC: Array,
    g_BcHC: Array | None,
    states: Array,
    do: Array,
    dy: Array,
    d_states: Array,
    *,
    programs: int | None = None,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Return (dq, dk, dv, dbeta) and, with g, dg.

    `programs`: one per multiprocessor by default. `interpret` runs on a CPU.
    """
    (B, T, H, K), (_, n_chunks, _, C) = q.shape, beta_BcHC.shape
    programs = min(programs or device.multiprocessors() or MULTIPROCESSORS, B * n_chunks * H)
    n = Sizes(B, H, K, v.shape[-1], C, n_chunks, jnp.dtype(q.dtype), g_BcHC is not None, interpret, programs)
    if T % C:
        pad = ((0, 0), (0, n_chunks * C - T), (0, 0), (0, 0))
        q, k, v, w, do, dy = (jnp.pad(x, pad) for x in (q, k, v, w, do, dy))
    g = jnp.zeros_like(beta_BcHC) if g_BcHC is None else g_BcHC
    dq, dk, dv, *vectors = mosaic_gpu.kernel(
        partial(kernel, n=n),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v, beta_BcHC, g)],
        scratch_types=scratch(n),
        grid=(n.programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="group",
        name="delta_rule_gradients",
        interpret=interpret,
    )(q, k, v, w, beta_BcHC, g, states, do, dy, d_states)
    return dq[:, :T], dk[:, :T], dv[:, :T], *vectors[: 1 + n.gate]
