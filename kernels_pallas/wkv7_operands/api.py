"""RWKV-7's recurrence operands, with interchangeable differentiable backends.

    z = bias + hidden @ matrix    (one low-rank map each for z_w, z_a and z_v)
    log w = -e^{-1/2} sigmoid(z_w),   eta = sigmoid(z_a),   rho = sigmoid(z_v)
    u = k k_k,   kappa = u / max(|u|, 1e-12) per head,   a = -kappa,   b = kappa eta
    k' = k (1 + (eta - 1) k_a),   s = sum over a head's channels of r k' r_k
    v' = v + (v_first - v) rho;   v' = v in the first layer and without `mix`

Products are elementwise, except `@`. `linear_attention` consumes r, k', v', log w, a and b: its state gets the rank-one
term b_t (a_t^T S_{t-1}). `head_norm` consumes (v', s) as its skip and adds s v' after the norm. Backward pass, with gx
the incoming gradient of result x (gv' sums both uses of v'), `sum` over batch and time, and n = max(|u|, 1e-12):

    dr = gr + gs k' r_k,   dk' = gk' + gs r r_k,   dr_k = sum gs r k'
    dkappa = gb eta - ga,   du = (dkappa - kappa (kappa . dkappa)) / n,   deta = dk' k k_a + gb kappa
    dk = dk' (1 + (eta - 1) k_a) + du k_k,   dk_k = sum du k,   dk_a = sum dk' k (eta - 1)
    dz_w = glog_w log_w (1 - sigmoid(z_w)),   dz_a = deta eta (1 - eta),   dz_v = gv' (v_first - v) rho (1 - rho)
    dv = gv' (1 - rho),   dv_first = gv_first + gv' rho
    dbias = sum dz,   dhidden = dz @ matrix^T,   dmatrix = sum hidden^T @ dz

If |u| <= 1e-12, du = dkappa / 1e-12. Both backends keep the inputs for the backward pass; triton also keeps the
products hidden @ matrix. xla materialises z in float32. triton adds the bias in registers and materialises dz in the
input dtype.
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
    """Return the operands of RWKV-7's recurrence and of the norm that follows it.

    Args:
      r_BTHK: receptances; fp32, bf16 or fp16 (fp64 under x64), any T >= 1.
      k_BTHK: projected keys.
      v_BTHK: projected values.
      decay: low-rank map z_w. `hidden_BTR` is its activated hidden layer, in the dtype of `r_BTHK`. `matrix_RD`, with
        D = H K, is rounded to this dtype. Biases and vectors are cast to fp32 (fp64).
      eta: low-rank map z_a.
      k_k_D: factors of the removal key kappa.
      k_a_D: weight of eta in the key.
      r_k_D: factors of the bonus s.
      mix: `first_BTHK`, the first layer's values, cast to the dtype of `v_BTHK`; `share`, the low-rank map z_v;
        `is_first_layer`, a scalar bool, may be traced: if true, v' = v. None: no mixing, v' = v.
      implementation: backend name; None picks the best backend that can run the call.

    Returns:
      `Operands`; log w and s are fp32 (fp64), the rest has the dtype of `r_BTHK`, rounded once. Use its `r_BTHK`,
      which is unchanged, instead of the argument: the backward kernel then adds the gradients without another pass
      over memory. `k_BTHK` and `v_BTHK` hold k' and v', `log_w_BTHK` the log decays, `a_BTHK` and `b_BTHK` the
      factors of the rank-one term, and `skip` holds (v', s) with s [B, T, H] for `head_norm`. `first_BTHK` holds the
      first layer's values, unchanged, for the next layer; it is None without `mix`. A first layer passes on its own v
      instead.

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
    operands = (r_BTHK, k_BTHK, v_BTHK, *(_wide(map_, acc) for map_ in (decay, eta)))
    if mix is not None:
        is_first = jnp.asarray(mix.is_first_layer, bool)
        mix = ValueMix(mix.first_BTHK.astype(v_BTHK.dtype), _wide(mix.share, acc), is_first)
    operands = (*operands, Vectors(*(x.astype(acc) for x in vectors)), mix)
    data = (r_BTHK, k_BTHK, v_BTHK, *(map_.hidden_BTR for map_ in maps.values()))
    kernels = backend.pick("wkv7_operands", BACKENDS, implementation, data, {})
    leaves, structure = jax.tree.flatten(operands)
    # Under `jax.shard_map`, the kernel's inputs must vary over the same mesh axes.
    return kernels.run(*jax.tree.unflatten(structure, vary_alike(*leaves)))


def _wide(map_: LowRank, acc: Any) -> LowRank:
    return map_._replace(bias_D=map_.bias_D.astype(acc))
