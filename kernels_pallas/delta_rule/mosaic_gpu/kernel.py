"""The delta rule's pass over time as one Pallas kernel for Hopper's matrix units.

    Y = beta (V - e^g K S),   W = (X * G) Y,   O = e^g Q S + M Y,   S <- e^{g_C} S + K^T (e^{g_C - g} W)

    operand      shape             dtype          meaning
    q, k         [B, T, H, K]      bf16 or fp16   queries, keys; T is a multiple of the chunk C
    v, w, o      [B, T, H, V]      as q           values, W, outputs
    x, m         [B, T, H, C]      as q           row t: the rows of X * G and M at position t
    vectors      [B, c, H, 3, C]   fp32           e^g, beta, e^{g_C - g}
    start, last  [B, H, V, K]      fp32           state before the first chunk and after the last
    states       [B, c, H, K, V]   as q           states before each chunk

Symbols are as in triton/fwd_kernels.py. All products are transposed: their rows are value channels, 64 in a warpgroup.

    Y^T = beta (V^T - e^g S^T K^T)    W^T = Y^T (X * G)^T    O^T = e^g S^T Q^T + Y^T M^T
    S^T <- e^{g_C} S^T + (e^{g_C - g} W)^T K

An accumulator has the registers of a left operand. So S, Y and W stay in registers, and no warpgroup waits for another
one's values. One more warpgroup copies chunks into a ring in shared memory. An output leaves through the place of its
values in the ring, which is free when the output has left. Memory bounds the kernel. So few products are in flight,
and their registers suffice for three warpgroups: then 192 values leave none idle, and keys are read once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic_gpu

ROWS = 64  # value channels of a warpgroup
GROUPS = 2  # most warpgroups that compute in a program, but for three if they fit
SHARED = 227 * 1024  # bytes of shared memory for a program
REGISTERS = {"compute": 232, "copy": 40}  # of a thread; at launch 168, and the sum over three warpgroups is the same
REGISTERS_OF_FOUR = {"compute": 160, "copy": 32}  # at launch 128


load: Any = plgpu.load  # type checkers may see an older signature


class Sizes(NamedTuple):
    """The static arguments of the kernel."""

    B: int
    H: int
    K: int
    V: int
    C: int
    chunks: int
    dtype: Any
    keep: bool  # write states and W
    interpret: bool
    reverse: bool = False  # back over the chunks (reverse.py)

    @property
    def groups(self) -> int:
        """Return how many warpgroups of a program compute.

        Three if none is idle then and their registers suffice.
        """
        rows = self.V // ROWS
        return 3 if self.K <= 96 and rows % 3 == 0 else min(GROUPS, rows)

    @property
    def parts(self) -> int:
        """Return the programs per head; a warpgroup of the last may be idle."""
        return -(-self.V // (ROWS * self.groups))

    @property
    def stages(self) -> int:
        """Return the chunks in the ring: 3 if they fit."""
        size = self.dtype.itemsize
        chunk = self.C * size * (2 * self.K + ROWS * self.groups + 2 * self.C) + 3 * self.C * 4
        kept = self.groups * ROWS * size * (self.K + self.C * (not self.reverse)) if self.keep else 0
        return 3 if 3 * chunk + kept + 1024 <= SHARED else 2


def scratch(n: Sizes) -> list:
    """Return the kernel's shared memory and barriers.

    Memory: the ring of k, q, x, m, v and vectors; with `keep` a state and W on their way out. Barriers: a chunk has
    arrived, its place is free.
    """

    def tiled(*shape: int, width: int = 64) -> Any:
        transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * n.dtype.itemsize)
        return plgpu.SMEM(shape, n.dtype, transforms=transforms)

    keys = tiled(n.stages, n.C, n.K, width=64 if n.K % 64 == 0 else 32)
    pairs = tiled(n.stages, n.C, n.C)
    kept = [tiled(n.groups, n.K, ROWS), *([] if n.reverse else [tiled(n.groups, n.C, ROWS)])]
    return [
        *(keys, keys, pairs, pairs, tiled(n.stages, n.groups, n.C, ROWS)),
        plgpu.SMEM((n.stages, 3, n.C), jnp.float32),
        *(kept if n.keep else []),
        plgpu.Barrier(num_arrivals=5 + n.groups, num_barriers=n.stages),
        plgpu.Barrier(num_arrivals=n.groups, num_barriers=n.stages),
    ]


class Refs(NamedTuple):
    """The kernel's arrays, shared memory and barriers."""

    q: Any
    k: Any
    v: Any
    x: Any
    m: Any
    vectors: Any
    start: Any
    o: Any
    last: Any
    states: Any
    w: Any
    k_smem: Any
    q_smem: Any
    x_smem: Any
    m_smem: Any
    v_smem: Any
    vectors_smem: Any
    states_smem: Any
    w_smem: Any
    there: Any
    free: Any


def refs_of(n: Sizes, refs: tuple[Any, ...]) -> Refs:
    """Return the kernel's arguments by name; None for those that only `keep` has."""
    missing = [] if n.keep else ["states", "states_smem"]
    missing += [] if n.keep and not n.reverse else ["w", "w_smem"]
    names = [name for name in Refs._fields if name not in missing]
    return Refs(**(dict.fromkeys(missing) | dict(zip(names, refs, strict=True))))


def kernel(*refs: Any, n: Sizes, chunk: Callable) -> None:
    """Write o, last, and with `keep` states and W, by `chunk` of every chunk.

    A program has `n.groups` times ROWS value channels of a head. Programs with an idle warpgroup start last.
    """
    r = refs_of(n, refs)
    program, group = lax.axis_index("program"), lax.axis_index("group")
    part, bh = lax.div(program, n.B * n.H), lax.rem(program, n.B * n.H)
    b, h = lax.div(bh, n.H), lax.rem(bh, n.H)
    rows = part * n.groups + group  # which ROWS value channels
    all_rows = n.V // ROWS

    @pl.when(group == n.groups)
    def _copy() -> None:
        _set_registers("copy", n)

        @pl.loop(0, n.chunks)
        def _(c: Array) -> None:
            slot = lax.rem(c, n.stages)
            pl.when(c >= n.stages)(lambda: plgpu.barrier_wait(r.free.at[slot]))
            c = n.chunks - 1 - c if n.reverse else c
            at, there = pl.ds(c * n.C, n.C), r.there.at[slot]
            for source, target in ((r.k, r.k_smem), (r.q, r.q_smem), (r.x, r.x_smem), (r.m, r.m_smem)):
                plgpu.copy_gmem_to_smem(source.at[b, at, h], target.at[slot], there)
            plgpu.copy_gmem_to_smem(r.vectors.at[b, c, h], r.vectors_smem.at[slot], there)
            for i in range(n.groups):  # an idle warpgroup's values are read, but not used
                channels = pl.ds(jnp.minimum(part * n.groups + i, all_rows - 1) * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(r.v.at[b, at, h, channels], r.v_smem.at[slot, i], there)

        @pl.loop(max(n.chunks - n.stages, 0), n.chunks)
        def _(c: Array) -> None:  # waits for every barrier phase, as the interpreter requires
            plgpu.barrier_wait(r.free.at[lax.rem(c, n.stages)])

    if all_rows % n.groups:

        @pl.when(jnp.logical_and(group < n.groups, rows >= all_rows))
        def _idle() -> None:
            _set_registers("copy", n)

            @pl.loop(0, n.chunks)
            def _(c: Array) -> None:
                slot = lax.rem(c, n.stages)
                plgpu.barrier_wait(r.there.at[slot])
                plgpu.barrier_arrive(r.free.at[slot])

    @pl.when(jnp.logical_and(group < n.groups, rows < all_rows))
    def _compute() -> None:
        _set_registers("compute", n)
        channels = pl.ds(rows * ROWS, ROWS)
        s_VK = load(r.start.at[b, h, channels], layout=plgpu.Layout.WGMMA, optimized=False)
        s_VK = lax.fori_loop(0, n.chunks, partial(chunk, at=(b, h, channels, group), r=r, n=n), s_VK)
        r.last.at[b, h, channels][...] = s_VK
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(r.free.at[(n.chunks - 1) % n.stages])


def _set_registers(role: str, n: Sizes) -> None:
    if n.groups > 1 and not n.interpret:
        registers = REGISTERS if n.groups == GROUPS else REGISTERS_OF_FOUR
        plgpu.set_max_registers(registers[role], action="increase" if role == "compute" else "decrease")


class Sum:
    """An accumulator for the interpreter, which takes no left operand from registers."""

    def __init__(self, value: Array) -> None:
        self.value = value


def start_product(acc: Any, a: Any, b: Any) -> None:
    """Start acc += a @ b, with `a` in registers or shared memory and `b` in shared memory."""
    if isinstance(acc, Sum):
        acc.value += jnp.dot(a[...].astype(jnp.float32), b[...].astype(jnp.float32))
    else:
        plgpu.wgmma(acc, a, b)


def wait_for(acc: Any, pending: int) -> Array:
    """Return an accumulator when at most `pending` later products are not finished."""
    return acc.value if isinstance(acc, Sum) else plgpu.wgmma_accumulator_load(acc, wait_n=pending)


def with_zeros(f: Callable, *shapes: tuple[int, int], n: Any) -> Any:
    """Return `f(*accumulators)`, which start from zero."""
    if n.interpret:
        return f(*(Sum(jnp.zeros(shape, jnp.float32)) for shape in shapes))
    return pl.run_scoped(f, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape in shapes))


def added_to(f: Callable, *values: Array, n: Any) -> Any:
    """Return the accumulators after `f(*accumulators)`, which start from `values`."""
    if n.interpret:
        sums = [Sum(value) for value in values]
        f(*sums)
        return [acc.value for acc in sums]
    return pl.run_state(lambda accs: f(*accs))(tuple(map(plgpu.WGMMAAccumulatorRef.init, values)))


def zeros(*shape: int) -> Array:
    """Return zeros with the registers of an accumulator."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def vector_of(r: Refs, slot: Any, i: int, n: Sizes) -> Array:
    """Return one of a chunk's vectors in every row of [ROWS, C]."""
    x_C = load(r.vectors_smem.at[slot, i], layout=plgpu.Layout.WGMMA.reduce(0))
    return lax.broadcast_in_dim(x_C, (ROWS, n.C), (1,))


def release(r: Refs, slot: Any) -> None:
    """Free the place of the chunk before, whose outputs have left it."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(r.free.at[slot])


def write(x: Array, smem: Any, target: Any) -> None:
    """Start to write the transpose of `x` to `target` through `smem`."""
    mosaic_gpu.transposed(smem)[...] = x
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, target)


def _chunk(c: Array, s_VK: Array, *, at: tuple[Any, ...], r: Refs, n: Sizes) -> Array:
    """Pass ROWS value channels of the state through chunk c, and write their outputs."""
    b, h, channels, group = at
    slot, shape, positions = lax.rem(c, n.stages), (ROWS, n.C), pl.ds(c * n.C, n.C)
    pairs = (r.k_smem, r.q_smem, r.x_smem, r.m_smem)
    k_KC, q_KC, x_CC, m_CC = (mosaic_gpu.transposed(ref.at[slot]) for ref in pairs)
    value_smem, vector = r.v_smem.at[slot, group], partial(vector_of, r, slot, n=n)
    plgpu.barrier_wait(r.there.at[slot])
    low_VK = s_VK.astype(n.dtype)

    def correct(acc: Any) -> Array:
        """Return Y^T."""
        start_product(acc, low_VK, k_KC)
        pl.when(c > 0)(lambda: release(r, lax.rem(c - 1, n.stages)))
        if n.keep:
            write(low_VK, r.states_smem.at[group], r.states.at[b, c, h, :, channels])
        v_VC = load(mosaic_gpu.transposed(value_smem), layout=plgpu.Layout.WGMMA)
        if not n.interpret:  # loaded while the product runs
            v_VC = lax.optimization_barrier(v_VC)
        seen_VC = wait_for(acc, 0)
        return (vector(1) * (v_VC.astype(jnp.float32) - seen_VC * vector(0))).astype(n.dtype)

    def read(acc: Any) -> tuple[Array, Array]:
        """Return e^g S^T Q^T and e^{g_C} S^T."""
        start_product(acc, low_VK, q_KC)
        decayed_VK = s_VK * r.vectors_smem[slot, 0, n.C - 1]
        if not n.interpret:  # computed while the product runs
            decayed_VK = lax.optimization_barrier(decayed_VK)
        return wait_for(acc, 0) * vector(0), decayed_VK

    y_VC = with_zeros(correct, shape, n=n)
    o_VC, s_VK = with_zeros(read, shape, n=n)

    def mix(o_acc: Any, w_acc: Any) -> None:
        start_product(o_acc, y_VC, m_CC)
        start_product(w_acc, y_VC, x_CC)
        write(wait_for(o_acc, 1).astype(n.dtype), value_smem, r.o.at[b, positions, h, channels])

    _, w_VC = added_to(mix, o_VC, zeros(*shape), n=n)
    late_VC = (w_VC * vector(2)).astype(n.dtype)

    def update(acc: Any) -> None:
        start_product(acc, late_VC, r.k_smem.at[slot])
        if n.keep:
            write(w_VC.astype(n.dtype), r.w_smem.at[group], r.w.at[b, positions, h, channels])

    return added_to(update, s_VK, n=n)[0]


def pass_over_time(
    q: Array,
    k: Array,
    v: Array,
    x: Array,
    m: Array,
    beta_BcHC: Array,
    g_BcHC: Array | None,
    start_BHKV: Array,
    *,
    keep: bool,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Return (o, last [B, H, K, V]) and, with `keep`, (states, W).

    The beta of positions after T must be 0. `interpret` runs on a CPU.
    """
    (B, T, H, K), (_, n_chunks, _, C) = q.shape, beta_BcHC.shape
    n = Sizes(B, H, K, v.shape[-1], C, n_chunks, jnp.dtype(q.dtype), keep, interpret)
    o, last, *kept = call(n, _chunk, q, k, v, x, m, vectors(beta_BcHC, g_BcHC), start_BHKV)
    if keep:
        kept[1] = kept[1][:, :T]
    return o[:, :T], last, *kept


@partial(jax.jit, static_argnums=(0, 1))  # layers of equal sizes share a compiled kernel
def call(n: Sizes, chunk: Callable, q, k, v, x, m, vectors: Array, start_BHKV: Array) -> tuple[Array, ...]:
    """Run the kernel with `chunk`; return o, last [B, H, K, V], and with `keep` states and W (not in reverse).

    T is padded to whole chunks with zeros.
    """
    after_T = n.chunks * n.C - q.shape[1]
    if after_T:
        q, k, v, x, m = (jnp.pad(a, ((0, 0), (0, after_T), (0, 0), (0, 0))) for a in (q, k, v, x, m))
    like = jax.ShapeDtypeStruct
    out = [v, like((n.B, n.H, n.V, n.K), jnp.float32)]
    if n.keep:
        out += [like((n.B, n.chunks, n.H, n.K, n.V), n.dtype), *([] if n.reverse else [v])]
    o, last, *kept = mosaic_gpu.kernel(
        partial(kernel, n=n, chunk=chunk),
        out_type=[like(a.shape, a.dtype) for a in out],
        scratch_types=scratch(n),
        grid=(n.B * n.H * n.parts,),
        grid_names=("program",),
        num_threads=n.groups + 1,
        thread_name="group",
        interpret=n.interpret,
        name=f"delta_rule_{'reverse' if n.reverse else 'forward'}",
    )(q, k, v, x, m, vectors, jnp.swapaxes(start_BHKV, 2, 3))
    return o, jnp.swapaxes(last, 2, 3), *kept


def vectors(beta_BcHC: Array, g_BcHC: Array | None) -> Array:
    """Return e^g, beta and e^{g_C - g}, [B, c, H, 3, C]."""
    g_BcHC = jnp.zeros_like(beta_BcHC) if g_BcHC is None else g_BcHC
    return jnp.stack([jnp.exp(g_BcHC), beta_BcHC, jnp.exp(g_BcHC[..., -1:] - g_BcHC)], axis=3)
