"""Differentiable ops with interchangeable backends: arrays in, arrays out.

The package needs only jax and jaxtyping.

    top1_chunk_attention      softmax over the local chunk and the past chunk (or k chunks) that each query selects
    selected_chunk_attention  the same attention, to past chunks that the caller selects
    select_chunk              the selection without the attention
    compressed_attention      NSA: attention to the means of past chunks, and the chunks that it selects
    index_loss                MSA: the loss of an index that selects chunks for this attention
    top1_element_attention    the value of each query's best key; softmax gradient (straight-through)
    *_decode                  one new token against a cache
    causal_attention          softmax attention, optionally with a window, ALiBi or forget gates
    path_attention            PaTH: each key is multiplied by the later tokens' matrices before it is scored
    path_walk                 PaTH: attention to earlier chunks, with a linear map of the query per chunk
    selective_scan            Mamba-1: a decay per channel and state
    ssd                       Mamba-2 and Mamba-3: a decay per head
    delta_rule                DeltaNet and Gated DeltaNet
    linear_attention          RWKV-5, 6 and 7, GLA, KDA, mLSTM: a decay per key channel
    kda                       KDA and Gated DeltaNet-2 from the pre-activations of their gates
    log_linear                log-linear Mamba-2: states of a Fenwick tree's blocks, a weight per level
    state_scan                states at the chunk starts of a chunked recurrence (delta rules, RWKV-7)
    state_passing             the same with an elementwise decay (Mamba-2, RWKV-5 and 6, Based)
    short_conv                short causal convolution before a recurrence, with SiLU and an L2 norm per head
    token_shift               RWKV: interpolate every input with the previous input
    wkv7_operands             RWKV-7: operands of linear_attention from the layer's projections
    mamba3_operands           Mamba-3: operands of ssd, biased and rotated per head
    head_norm                 post-recurrence: per-head norm and output gate
    residual_norm             the norm of a block, for a residual stream x + f(norm(x))
    cross_entropy             token losses, and their gradient with respect to the logits as a result
    unit_lower_inverse        batched inverse of unit lower triangular matrices

Operands and results. B batch, T time, H heads, G key-value heads (or groups), K key dim, V value dim, C chunk, c
chunks, D model, E inner width, N state, O vocabulary, S cache length. Optional operands are in brackets.

    op                        operands                                              result
    top1_chunk_attention      q [B,T,H,K]  k [B,T,G,K]  v [B,T,G,V]                 [B,T,H,V]
    selected_chunk_attention  q, k, v as above, chunks [B,T,H,k] int32              [B,T,H,V]
    compressed_attention      q [B,T,H,K]  mean k [B,c,G,K]  mean v [B,c,G,V]       [B,T,H,V]  chunks [B,T,G,n]
    select_chunk              q [B,T,H,K]  k [B,T,G,K]                              chunks [B,T,H] or [B,T,H,k] int32
    index_loss                index q [B,T,G,N], k [B,T,N]  q, k  chunks [B,T,G,n]  scalar
    top1_chunk_decode         q [B,H,K]  caches [B,S,G,K], [B,S,G,V]  length        [B,H,V]
    top1_element_attention    q [B,T,H,K]  k [B,T,G,K]  v [B,T,G,V]                 [B,T,H,V]
    top1_element_decode       q [B,H,K]  caches [B,S,G,K], [B,S,G,V]  length        [B,H,V]
    causal_attention          q [B,T,H,K]  k [B,T,G,K]  v [B,T,G,V]  (log gates)   [B,T,H,V]
    path_attention            q [B,T,H,K]  k, w [B,T,G,K]  v [B,T,G,V]  beta        [B,T,H,V]
    path_walk                 q, k [c,B,H,C,K]  v [c,B,H,C,V]  P [c,B,H,K,K]        [c,B,H,C,V]
    selective_scan            x, dt [B,T,E]  A [E,N]  B, C [B,T,N]  D [E]  state    y [B,T,E]  state [B,E,N]
    ssd                       x [B,T,H,V]  log a [B,T,H]  b, c [B,T,(G,)N]  state   y [B,T,H,V]  state [B,H,N,V]
    delta_rule                q, k [B,T,H,K]  v [B,T,H,V]  beta, (log g) [B,T,H]    o [B,T,H,V]  state [B,H,K,V]
    linear_attention          r, k, log w [B,T,H,K]  v [B,T,H,V]  (u [H,K])         o [B,T,H,V]  state [B,H,K,V]
    kda                       q, k, decay [B,T,H,K]  v [B,T,H,V]  beta [B,T,H(,K)]  o [B,T,H,V]  state [B,H,K,V]
    log_linear                x [B,T,H,V]  log a [B,T,H]  b, c [B,T,N]  m [B,T,H,L]  [B,T,H,V]
    state_scan                d [c,B,H,k]  P [c,B,H,K,K]  R [c,B,H,K,V]  state      [c,B,H,K,V]  state [B,H,K,V]
    state_passing             decay, update [B,c,...]  state [B,...]                [B,c,...]  state [B,...]
    short_conv                x [B,T,E]  taps [E,W]  (bias [E])                     [B,T,E]
    token_shift               x [B,T,D]  (last [B,D])  N shares [D]                 N arrays [B,T,D]
    wkv7_operands             r, k, v [B,T,H,K]  low-rank maps, vectors             operands of linear_attention
    mamba3_operands           b, c [B,T,N]  turn [B,T,R]  dt [B,T,H]  biases [H,N]  k, q [B,T,H,N]
    head_norm                 x [B,T,H,V]  (gate [B,T,H,V])  gain [H,V]             [B,T,H,V]
    residual_norm             x [B,T,D]  gain [D]                                   x and norm(x), [B,T,D] each
    cross_entropy             logits [B,C,O]  targets, weights [B,C]                losses [B,C]  gradient [B,C,O]
    unit_lower_inverse        M [...,C,C], strictly lower triangular                (I + M)^-1 [...,C,C]

Each op except unit_lower_inverse takes `implementation=None | "triton" | "pallas" | "xla"`; causal_attention takes
"cudnn", "triton", "splash", "xla" or "chunked". None picks the first backend that can run the problem. `backends_used`
returns the chosen backends, and `register_backend` adds a backend from another package. Equations: docs/kernels.md.
Papers: arXiv 2505.18522 (Top-1 Chunk and Element), 2312.00752, 2405.21060, 2406.06484.
"""

from kernels_pallas.attention.api import causal_attention
from kernels_pallas.backend import Backend, BackendError, Problem
from kernels_pallas.backend import used as backends_used
from kernels_pallas.chunks import join_chunks, split_chunks
from kernels_pallas.compressed_attention.api import compressed_attention
from kernels_pallas.cross_entropy.api import cross_entropy
from kernels_pallas.delta_rule.api import delta_rule
from kernels_pallas.head_norm.api import head_norm, residual_norm
from kernels_pallas.index_loss.api import index_loss
from kernels_pallas.kda.api import kda
from kernels_pallas.kda.xla import log_decay as kda_log_decay
from kernels_pallas.linear_attention.api import linear_attention
from kernels_pallas.log_linear.api import log_linear
from kernels_pallas.mamba3_operands.api import mamba3_operands
from kernels_pallas.numerics import accumulation_dtype
from kernels_pallas.outside import register_backend
from kernels_pallas.path_attention.api import path_attention
from kernels_pallas.path_walk.api import path_walk
from kernels_pallas.segments import positions as segment_positions
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
    "compressed_attention",
    "cross_entropy",
    "delta_rule",
    "head_norm",
    "index_loss",
    "join_chunks",
    "kda",
    "kda_log_decay",
    "linear_attention",
    "log_linear",
    "mamba3_operands",
    "path_attention",
    "path_walk",
    "register_backend",
    "residual_norm",
    "segment_positions",
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
