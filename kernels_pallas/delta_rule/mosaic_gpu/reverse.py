"""The delta rule's pass back over time as one Pallas kernel for Hopper's matrix units.

    dW = e^{g_C - g} (K L),   dY = M^T dO + (X * G)^T dW,   L <- e^{g_C} L + Q^T (e^g dO) - K^T (e^g beta dY)

L is the gradient of the state after a chunk. Operands are as in kernel.py, with

    operand      shape             dtype          meaning
    v, o         [B, T, H, V]      as q           the output gradient dO, and dY
    vectors      [B, c, H, 3, C]   fp32           e^g, beta, e^{g_C - g}
    start, last  [B, H, V, K]      fp32           gradients of the states after the last and before the first chunk
    states       [B, c, H, K, V]   as q           L of each chunk

All products are transposed as in kernel.py. dO^T is the left operand of two of them. Three products depend on each
other: L^T K^T, dW^T (X * G), dY^T K.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import mosaic_gpu
from kernels_pallas.delta_rule.mosaic_gpu import kernel as forward
from kernels_pallas.delta_rule.mosaic_gpu.kernel import ROWS, Refs, Sizes, start_product, wait_for


def _chunk(step: Array, l_VK: Array, *, at: tuple, r: Refs, n: Sizes) -> Array:
    """Pass ROWS value channels of L back through a chunk, and write their dY and L."""
    b, h, channels, group = at
    c, slot = n.chunks - 1 - step, lax.rem(step, n.stages)
    k_CK, q_CK, x_CC, m_CC = (ref.at[slot] for ref in (r.k_smem, r.q_smem, r.x_smem, r.m_smem))
    value_smem, vector = r.v_smem.at[slot, group], partial(forward.vector_of, r, slot, n=n)
    plgpu.barrier_wait(r.there.at[slot])
    low_VK = l_VK.astype(n.dtype)

    def late(acc: Any) -> tuple[Array, Array, Array]:
        """Return dW^T, dO^T and e^{g_C} L^T."""
        start_product(acc, low_VK, mosaic_gpu.transposed(k_CK))
        pl.when(step > 0)(lambda: forward.release(r, lax.rem(step - 1, n.stages)))
        forward.write(low_VK, r.states_smem.at[group], r.states.at[b, c, h, :, channels])
        do_VC = forward.load(mosaic_gpu.transposed(value_smem), layout=plgpu.Layout.WGMMA)
        decayed_VK = l_VK * r.vectors_smem[slot, 0, n.C - 1]
        if not n.interpret:  # computed while the product runs
            do_VC, decayed_VK = lax.optimization_barrier((do_VC, decayed_VK))
        return (wait_for(acc, 0) * vector(2)).astype(n.dtype), do_VC, decayed_VK

    w_VC, do_VC, decayed_VK = forward.with_zeros(late, (ROWS, n.C), n=n)

    def products(l_acc: Any, y_acc: Any) -> None:
        start_product(y_acc, do_VC, m_CC)
        start_product(y_acc, w_VC, x_CC)
        start_product(l_acc, (do_VC.astype(jnp.float32) * vector(0)).astype(n.dtype), q_CK)
        y_VC = wait_for(y_acc, 1)
        start_product(l_acc, (y_VC * (-vector(0) * vector(1))).astype(n.dtype), k_CK)
        forward.write(y_VC.astype(n.dtype), value_smem, r.o.at[b, pl.ds(c * n.C, n.C), h, channels])

    l_VK, _ = forward.added_to(products, decayed_VK, forward.zeros(ROWS, n.C), n=n)
    return l_VK


def pass_back_over_time(
    q: Array,
    k: Array,
    x: Array,
    m: Array,
    beta_BcHC: Array,
    g_BcHC: Array | None,
    do: Array,
    d_last_BHKV: Array,
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Return (state gradients L [B, c, H, K, V], dY, gradient of the initial state).

    The beta of positions after T must be 0. `interpret` runs on a CPU.
    """
    (B, T, H, K), (_, n_chunks, _, C) = q.shape, beta_BcHC.shape
    n = Sizes(B, H, K, do.shape[-1], C, n_chunks, jnp.dtype(q.dtype), keep=True, interpret=interpret, reverse=True)
    vectors = forward.vectors(beta_BcHC, g_BcHC)
    dy, d_initial, d_states = forward.call(n, _chunk, q, k, do, x, m, vectors, d_last_BHKV)
    return d_states, dy[:, :T], d_initial
