"""Differentiable ops over interchangeable backends: arrays in, arrays out. Needs jax and jaxtyping alone.

    top1_chunk_attention    every query attends to its own chunk (causal) and to the one past chunk that it selects
    select_chunk            that selection alone
    selected_chunk_attention  the attention alone, to chunks that the caller selects
    top1_element_attention  every query returns the value of its best key; softmax gradient (straight-through)
    *_decode                one token against a cache
    state_scan              states at the chunk starts of a chunked recurrence (the delta rules, RWKV-7)
    state_passing           the same with a decay by element (Mamba-2, RWKV-5 and 6, Based)
    selective_scan          Mamba-1: a decay per channel and state
    ssd                     Mamba-2 and 3: a decay per head
    delta_rule              DeltaNet and Gated DeltaNet
    linear_attention        RWKV-5, 6 and 7, GLA, KDA: a decay per key channel
    short_conv              the short causal convolution before a recurrence, with SiLU and an L2 norm per head
    token_shift             RWKV's interpolations of every input with the one before it
    wkv7_operands           what RWKV-7 makes of its projections before the recurrence
    head_norm               what stands behind a recurrence: a norm per head and a gate
    residual_norm           the norm of a block beside the residual stream
    path_walk               PaTH's queries on their way back over the chunks before theirs
    cross_entropy           losses of tokens, with the gradient of their logits as a result

Each takes `implementation=None | "triton" | "pallas" | "xla"` (causal_attention: "cudnn", "splash", "xla", "chunked");
`backends_used` says which one ran, and `register_backend` adds one of your own. See docs/kernels.md.
Papers: arXiv 2505.18522 (Top-1 Chunk and Element), 2312.00752, 2405.21060, 2406.06484.
"""

from kernels_pallas.attention.api import causal_attention
from kernels_pallas.backend import Backend, BackendError, Problem
from kernels_pallas.backend import used as backends_used
from kernels_pallas.chunks import join_chunks, split_chunks
from kernels_pallas.cross_entropy.api import cross_entropy
from kernels_pallas.delta_rule.api import delta_rule
from kernels_pallas.head_norm.api import head_norm, residual_norm
from kernels_pallas.linear_attention.api import linear_attention
from kernels_pallas.numerics import accumulation_dtype
from kernels_pallas.outside import register_backend
from kernels_pallas.path_walk.api import path_walk
from kernels_pallas.select_chunk.api import select_chunk
from kernels_pallas.selective_scan.api import selective_scan
from kernels_pallas.short_conv.api import short_conv
from kernels_pallas.ssd.api import ssd
from kernels_pallas.state_scan.api import state_passing, state_scan
from kernels_pallas.token_shift.api import token_shift
from kernels_pallas.top1_chunk.api import selected_chunk_attention, top1_chunk_attention
from kernels_pallas.top1_chunk.decode import (
    chunk_means,
    chunk_table,
    top1_chunk_decode,
    update_chunk_means,
    update_chunk_table,
)
from kernels_pallas.top1_element.api import top1_element_attention
from kernels_pallas.top1_element.decode import top1_element_decode
from kernels_pallas.triangular import unit_lower_inverse
from kernels_pallas.wkv7_operands.api import wkv7_operands
from kernels_pallas.wkv7_operands.interface import LowRank, ValueMix

__all__ = [
    "Backend",
    "BackendError",
    "LowRank",
    "Problem",
    "ValueMix",
    "accumulation_dtype",
    "backends_used",
    "causal_attention",
    "chunk_means",
    "chunk_table",
    "cross_entropy",
    "delta_rule",
    "head_norm",
    "join_chunks",
    "linear_attention",
    "path_walk",
    "register_backend",
    "residual_norm",
    "select_chunk",
    "selected_chunk_attention",
    "selective_scan",
    "short_conv",
    "split_chunks",
    "ssd",
    "state_passing",
    "state_scan",
    "token_shift",
    "top1_chunk_attention",
    "top1_chunk_decode",
    "top1_element_attention",
    "top1_element_decode",
    "unit_lower_inverse",
    "update_chunk_means",
    "update_chunk_table",
    "wkv7_operands",
]
