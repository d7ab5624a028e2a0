"""Launch the Triton kernels of PaTH attention, with a custom VJP.

Forward: the inverses X of all chunks, the part within chunks, then `path_walk`'s kernel. Backward: `path_walk`'s
kernels, then three kernels for the part within chunks. The backward pass keeps the inputs, X, queries at the start and
keys at the end of their chunk, the products P, the output and the logsumexp of the scores. It recomputes only tiles
within chunks. Equations: `path_attention/api.py`, kernels.py.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.batching import fold_vmap
from kernels_pallas.chunks import from_chunks, split_chunks, to_chunks
from kernels_pallas.path_attention.triton import chunk as chunk_of
from kernels_pallas.path_attention.triton import kernels
from kernels_pallas.path_walk.triton import walk
from kernels_pallas.triton import runtime
from kernels_pallas.triton.blocks import padded, precision

# Warps per program. A warp of `solve` waits for no other; 8 warps spill in `matrices`.
WARPS = {"solve": 1, "forward": 4, "scores": 4, "matrices": 4, "keys": 4}


class Sizes(NamedTuple):
    """Static options of a call: tokens per chunk and whether there are forget gates."""

    chunk: int
    gates: bool


def run(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGV: Array,
    w_BTGK: Array,
    beta_BTG: Array,
    log_f_BTH: Array | None,
    *,
    chunk_size: int,
) -> Array:
    """Return o_BTHV; it has first derivatives, in reverse mode."""
    chunk, repeats = chunk_of(q_BTHK.shape[1], chunk_size, q_BTHK.dtype), q_BTHK.shape[2] // k_BTGK.shape[2]
    w_BTGK, beta_BTG = w_BTGK.astype(jnp.float32), beta_BTG.astype(jnp.float32)
    k_BTHK, v_BTHV, w_BTHK, beta_BTH = (jnp.repeat(x, repeats, axis=2) for x in (k_BTGK, v_BTGV, w_BTGK, beta_BTG))
    beta_BcHC = jnp.moveaxis(split_chunks(beta_BTH, chunk), 2, 3)
    forgotten_BTH = beta_BTH if log_f_BTH is None else jnp.cumsum(log_f_BTH.astype(jnp.float32), axis=1)
    forgotten_cBHC = to_chunks(forgotten_BTH, chunk)  # not read without gates
    sizes = Sizes(chunk, log_f_BTH is not None)
    return _attend(q_BTHK, k_BTHK, v_BTHV, w_BTHK, beta_BcHC, forgotten_cBHC, sizes)


# Parts of a sharding rule (batching.py).
_OPERANDS = "b t h k, b t h k, b t h v, b t h k, b c h q, c b h q"
_KEPT = "b t h q, c b h q k, c b h q k, c b h k l, c b h q"


def _fold(f: Any, rule: str) -> Any:
    return fold_vmap(f, rule, split=("b", "h"), axis=None)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attend(q, k, v, w, beta, forgotten, sizes: Sizes) -> Array:
    return _forward(q, k, v, w, beta, forgotten, sizes)[0]


def _forward(q, k, v, w, beta, forgotten, sizes: Sizes) -> tuple[Array, tuple[Array, ...]]:
    run = _fold(partial(_run_forward, sizes=sizes), f"{_OPERANDS} -> b t h v, {_KEPT}")
    o, *kept = run(q, k, v, w, beta, forgotten)
    return o, (q, k, v, w, beta, forgotten, o, *kept)


def _backward(sizes: Sizes, saved: tuple[Array, ...], do_BTHV: Array) -> tuple[Array, ...]:
    rule = f"{_OPERANDS}, b t h v, {_KEPT}, b t h v -> {_OPERANDS}"
    return tuple(_fold(partial(_run_backward, sizes=sizes), rule)(*saved, do_BTHV))


_attend.defvjp(_forward, _backward)


def _run_forward(q, k, v, w, beta, forgotten, *, sizes: Sizes) -> tuple[Array, ...]:
    (B, T, H, K), V, C = q.shape, v.shape[-1], sizes.chunk
    chunks = beta.shape[1]
    wide = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    of_chunk = (chunks, B, H)
    (x,) = _launch(
        "solve",
        kernels.solve_kernel,
        w,
        beta,
        out=[jax.ShapeDtypeStruct((B, T, H, C), walk.product_dtype(k.dtype))],
        operands=(q, v),
        sizes=sizes,
    )
    start, end, product, own, lse = _launch(
        "forward",
        kernels.forward_kernel,
        *(q, k, v, w, x, beta, forgotten),
        out=[
            wide((*of_chunk, C, K)),
            jax.ShapeDtypeStruct((*of_chunk, C, K), k.dtype),
            jax.ShapeDtypeStruct((*of_chunk, K, K), walk.product_dtype(k.dtype)),
            wide((*of_chunk, C, V)),
            wide((*of_chunk, C)),
        ],
        operands=(q, v),
        sizes=sizes,
    )
    if chunks > 1:
        own, total = walk.forward(start, end, to_chunks(v, C), product, forgotten, own, lse, gates=sizes.gates)
    else:
        total = lse * walk.LOG2_E
    return from_chunks(own, T).astype(q.dtype), x, start, end, product, total


def _run_backward(
    q, k, v, w, beta, forgotten, o, x, start, end, product, total, do, *, sizes: Sizes
) -> tuple[Array, ...]:
    chunks, C = beta.shape[1], sizes.chunk
    do = do.astype(v.dtype)
    D = to_chunks(jnp.einsum("bthv,bthv->bth", do, o, preferred_element_type=jnp.float32), C)
    v_cBHCV = to_chunks(v, C)
    if chunks > 1:
        dstart, dend, dv, dproduct, of_query, of_key = walk.backward(
            start, end, v_cBHCV, product, forgotten, to_chunks(do, C), total, D, gates=sizes.gates
        )
    else:
        dstart, dend, dv, of_query, of_key = map(jnp.zeros_like, (start, end, v_cBHCV, D, D))
        dproduct = jnp.zeros_like(product, jnp.float32)
    launch = partial(_launch, operands=(q, v), sizes=sizes)
    pairs = (*D.shape, C)
    dq, dv, ds, dn, of_dn, dbeta, dgates = launch(
        "scores",
        kernels.scores_kernel,
        *(q, k, v, w, x, beta, forgotten, do, total, D, dstart, dv),
        out=[
            *(q, v, jax.ShapeDtypeStruct(pairs, k.dtype), jax.ShapeDtypeStruct(pairs, x.dtype), D, beta),
            forgotten if sizes.gates else jax.ShapeDtypeStruct((1,), beta.dtype),  # one entry: not written
        ],
    )
    dw, dbeta = launch(
        "matrices",
        kernels.matrices_kernel,
        *(q, k, w, x, beta, dn, of_dn, dend, dproduct, dbeta),
        out=[w, beta],
    )
    dk, dw = launch("keys", kernels.keys_kernel, *(q, k, w, x, beta, ds, dstart, dend, dw), out=[k, w])
    dgates = dgates + of_query - of_key if sizes.gates else jnp.zeros_like(forgotten)
    return dq, dk, dv, dw, dbeta, dgates


def _launch(
    kind: str, kernel: Any, *arrays: Array, out: list, operands: tuple[Array, Array], sizes: Sizes
) -> tuple[Array, ...]:
    """Launch `kernel` over all chunks of all heads; `operands` are q and v."""
    (B, T, H, K), V, C = operands[0].shape, operands[1].shape[-1], sizes.chunk
    constants: dict[str, Any] = {"T": T, "H": H, "K": K, "KP": padded(K), "C": C, "BOUNDED": T % C != 0}
    if kind != "solve":
        constants |= {"B": B, "V": V, "VP": padded(V), "SCALE": K**-0.5, "GATES": sizes.gates}
        constants |= {"PRECISION": precision(operands[0].dtype)}
    return runtime.launch(
        kernel,
        *arrays,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out],
        grid=(B * H * -(-T // C),),
        num_warps=WARPS[kind],
        num_stages=1,
        name=f"path_attention_{kind}",
        **constants,
    )
