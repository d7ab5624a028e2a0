"""RWKV-7's recurrence operands, with interchangeable differentiable backends.

    log w = -e^{-1/2} sigmoid(z_w),   eta = sigmoid(z_a),   rho = sigmoid(z_v)           z = bias + hidden matrix
    kappa = k k_k / |k k_k| of every head,   a = -kappa,   b = kappa eta
    k' = k (1 + (eta - 1) k_a),   v' = v + (v_first - v) rho,   s = sum over a head of r k' r_k

a and b are the low-rank part of `linear_attention`. s is the bonus, with which `head_norm` adds v'. On the right, d are
the gradients of the results, |k k_k| = n, and parameter gradients are sums over tokens:

    dr = dr + ds k' r_k,   dk' = dk' + ds r r_k,   dr_k = sum ds r k'
    dkappa = db eta - da,   dn = (dkappa - kappa (kappa . dkappa)) / n,   deta = dk' k k_a + db kappa
    dk = dk' (1 + (eta - 1) k_a) + dn k_k,   dk_k = sum dn k,   dk_a = sum dk' k (eta - 1)
    dz_w = dlog_w log_w (1 - sigmoid(z_w)),   dz_a = deta eta (1 - eta),   dz_v = dv' (v_first - v) rho (1 - rho)
    dv = dv' (1 - rho),   dv_first = dv_first + dv' rho
    dbias = sum dz,   dhidden = dz matrix^T,   dmatrix = sum hidden^T dz

Both backends keep the inputs for the backward pass; triton also keeps the products of hidden values and matrices. xla
writes z in float32. triton adds the bias in registers and writes dz in the input dtype.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas import backend
from kernels_pallas.batching import vary_alike
from kernels_pallas.numerics import accumulation_dtype
from kernels_pallas.wkv7_operands import triton, xla
from kernels_pallas.wkv7_operands.interface import LowRank, Operands, ValueMix, Vectors

BACKENDS = (triton.BACKEND, xla.BACKEND)


def wkv7_operands(
    r_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHK: Float[Array, "B T H K"],
    *,
    decay: LowRank,
    eta: LowRank,
    k_k_D: Float[Array, "D"],
    k_a_D: Float[Array, "D"],
    r_k_D: Float[Array, "D"],
    mix: ValueMix | None = None,
    implementation: str | None = None,
) -> Operands:
    """Return the operands of RWKV-7's recurrence and of the following norm.

    Args:
      r_BTHK: receptances; fp32, bf16 or fp16 (fp64 under x64), any T >= 1.
      k_BTHK: projected keys.
      v_BTHK: projected values.
      decay: low-rank map for the decays. Its hidden values [B, T, R] have passed their activation and have the dtype of
        `r_BTHK`. Matrices [R, D] with D = H K are rounded to that dtype; biases and vectors are cast to fp32 (fp64).
      eta: low-rank map for the step sizes.
      k_k_D: factors of the removal key kappa.
      k_a_D: weight of eta in the key.
      r_k_D: factors of the bonus.
      mix: the first layer's values [B, T, H, K] and their weight in this layer's values; None: no mixing.
      implementation: backend name; None picks the best backend that can run the call.

    Returns:
      `Operands`, with log w and bonus in fp32 (fp64) and the rest in the dtype of `r_BTHK`, rounded once.

    Raises:
      ValueError: shapes that disagree.
      BackendError: (a ValueError) the chosen implementation cannot run the call.

    Source: Peng et al., arXiv 2503.14456, section 4.
    """
    shape, acc = r_BTHK.shape, accumulation_dtype(r_BTHK)
    B, T, H, K = shape
    vectors = Vectors(k_k_D, k_a_D, r_k_D)
    maps = {"decay": decay, "eta": eta} | ({} if mix is None else {"mix.share": mix.share})
    expected: dict[str, tuple[Any, tuple]] = {"k_BTHK": (k_BTHK, shape), "v_BTHK": (v_BTHK, shape)}
    expected |= {name: (x, (H * K,)) for name, x in vectors._asdict().items()}
    for name, (hidden, matrix, bias) in maps.items():
        R = len(matrix)
        expected |= {f"{name}.hidden_BTR": (hidden, (B, T, R)), f"{name}.matrix_RD": (matrix, (R, H * K))}
        expected |= {f"{name}.bias_D": (bias, (H * K,))}
    if mix is not None:
        expected |= {"mix.first_BTHK": (mix.first_BTHK, shape)}
    for name, (x, wanted) in expected.items():
        if x.shape != wanted:
            raise ValueError(f"{name} must be {wanted} for r_BTHK {shape}; it is {x.shape}")
    given = (r_BTHK, k_BTHK, v_BTHK, *(_wide(map_, acc) for map_ in (decay, eta)))
    if mix is not None:
        is_first = jnp.asarray(mix.is_first_layer, bool)
        mix = ValueMix(mix.first_BTHK.astype(v_BTHK.dtype), _wide(mix.share, acc), is_first)
    given = (*given, Vectors(*(x.astype(acc) for x in vectors)), mix)
    data = (r_BTHK, k_BTHK, v_BTHK, *(map_.hidden_BTR for map_ in maps.values()))
    kernels = backend.pick("wkv7_operands", BACKENDS, implementation, data, {})
    leaves, structure = jax.tree.flatten(given)
    return kernels.run(*jax.tree.unflatten(structure, vary_alike(*leaves)))


def _wide(map_: LowRank, acc: Any) -> LowRank:
    return map_._replace(bias_D=map_.bias_D.astype(acc))
