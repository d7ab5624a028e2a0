"""Attention kernels as a leaf package: arrays in, arrays out, nothing of seqjax imported.

    top1_chunk_attention    every query attends to its own chunk (causal) and to the one past chunk that it selects
    select_chunk            that selection alone
    top1_element_attention  every query returns the value of its best key; softmax gradient (straight-through)
    *_decode                one token against a cache

Each takes `implementation=None | "xla" | ...`; see `dispatch.py` and docs/kernels.md. Paper: arXiv 2505.18522. On a CPU
import this before JAX computes anything: `cpu_compiler.py` says why.
"""

from kernels_pallas.cpu_compiler import use_safe_fusions
from kernels_pallas.dispatch import BackendError
from kernels_pallas.top1_chunk.decode import chunk_means, top1_chunk_decode, update_chunk_means
from kernels_pallas.top1_chunk.vjp import select_chunk, top1_chunk_attention
from kernels_pallas.top1_element.decode import top1_element_decode
from kernels_pallas.top1_element.vjp import top1_element_attention

__all__ = [
    "BackendError",
    "chunk_means",
    "select_chunk",
    "top1_chunk_attention",
    "top1_chunk_decode",
    "top1_element_attention",
    "top1_element_decode",
    "update_chunk_means",
]

use_safe_fusions()  # before JAX computes anything
