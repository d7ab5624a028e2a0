"""Run JAX's splash attention on batches of sequences of any length, over a mesh.

The kernel (`jax.experimental.pallas.ops.tpu.splash_attention`) takes one sequence: scaled queries [H, T, K], keys and
values [G, T, K], where each key head serves H / G query heads. T must be a multiple of its block. This module pads time
to whole blocks; the causal mask hides padded keys, because they are later than every query. The kernel has no rule for
automatic sharding, so over a mesh `jax.shard_map` gives each device its sequences and heads.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec

from kernels_pallas.attention.interface import is_automatic
from kernels_pallas.xla_tiles import pad_to

# Maximal side of a score block, in positions; every side is a multiple of the lane count.
BLOCK, LANES = 512, 128


def attend(
    q_BTHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    log_f_BTH: Array | None = None,
    *,
    window: int,
    scale: float,
    slopes: tuple[float, ...],
    split: PartitionSpec | None = None,
    segments_BT: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Return o_BTHK in the dtype of q.

    `window` includes the query; 0 means none. `split` may divide B and the heads, not T. The caller has refused slopes
    and gates. `interpret` runs the kernel in Pallas' interpreter, on any device.
    """
    del log_f_BTH, slopes

    def local(q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, segments_BT: Array | None = None) -> Array:
        seq_len, n_heads = q_BTHK.shape[1:3]
        block = min(BLOCK, -(-seq_len // LANES) * LANES)
        padded = -(-seq_len // block) * block
        kernel = _kernel(n_heads, padded, window if window < seq_len else 0, block, interpret)
        # The scale is applied to q, and the result rounded to q's dtype: exact if the scale is a power of two.
        heads_first = (jnp.moveaxis(pad_to(x, padded, axis=1), 1, 2) for x in (_scaled(q_BTHK, scale), k_BTGK, v_BTGK))
        documents = ()
        if segments_BT is not None:
            segments_BT = pad_to(segments_BT, padded, axis=1)
            documents = (splash.SegmentIds(q=segments_BT, kv=segments_BT),)
        o_BHTK = jax.vmap(kernel)(*heads_first, *documents)
        return jnp.moveaxis(o_BHTK, 1, 2)[:, :seq_len]

    packed = () if segments_BT is None else (segments_BT,)
    if not is_automatic(split):
        return local(q_BTHK, k_BTGK, v_BTGK, *packed)
    in_specs = (*(split,) * 3, *[PartitionSpec(*split[:2])] * len(packed))
    sharded = jax.shard_map(local, in_specs=in_specs, out_specs=split, check_vma=False)
    return sharded(q_BTHK, k_BTGK, v_BTGK, *packed)


def _scaled(q_BTHK: Array, scale: float) -> Array:
    return (q_BTHK.astype(jnp.float32) * scale).astype(q_BTHK.dtype)


class _CheapMask(splash.LocalMask):
    """A `LocalMask` that returns uniform blocks (all masked or visible) as one entry [1, 1].

    To build the kernel, splash calls `any` and `all` on every block. At 102,400 tokens there are 40,000 blocks of 512 x
    512, and all but a few hundred are uniform. Computing their pairs takes a minute.
    """

    def __getitem__(self, idx: Any) -> np.ndarray:
        rows, cols = idx
        left, _ = self.window_size
        nearest, farthest = rows.start - (cols.stop - 1), rows.stop - 1 - cols.start
        if farthest < 0 or (left is not None and nearest > left):
            return np.zeros((1, 1), bool)
        if nearest >= 0 and (left is None or farthest <= left):
            return np.ones((1, 1), bool)
        return super().__getitem__(idx)


@cache
def _kernel(n_heads: int, padded: int, window: int, block: int, interpret: bool) -> Any:
    """Return the kernel for [H, T, K].

    The cache avoids building the mask again in every layer.
    """
    mask = _CheapMask((padded, padded), (window - 1 if window else None, 0), offset=0)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    # As numpy arrays the kernel's mask tables are constants in any trace; JAX arrays would belong to the first trace.
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        kernel = splash.make_splash_mha_single_device(
            splash.MultiHeadMask([mask] * n_heads),
            block_sizes=sizes,
            interpret=interpret,
            residual_checkpoint_name="attention_out",
        )
        return jax.tree.map(np.asarray, kernel)
