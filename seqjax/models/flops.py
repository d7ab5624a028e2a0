"""Model FLOPs per token, peak rates of known devices, and MFU (model FLOPs utilisation).

Forward: 2 per parameter of a matrix (embedding look-ups and tables over positions multiply nothing) plus what the mixer
says of itself, counting only what its mask, window or selection needs. Training is three times the forward, except
where a mixer's `train_flops_per_token` knows better (a selection that has no backward).
"""

import math
from typing import Any

import jax

from seqjax.models.language_model import Model
from seqjax.sharding import is_axes

# Dense bf16 peak of one device in TFLOP/s (vendors' datasheets), by a part of `device_kind`.
PEAK_TFLOPS = {
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "T4": 65.0,
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5p": 459.0,
    "TPU v6 lite": 918.0,
}

# Axes of parameters that are looked up or broadcast, not multiplied as a matrix.
TABLES = {"positions", "state"}


def peak_flops(device: Any = None) -> float | None:
    """Peak bf16 FLOP/s of a device (the first one if none is given), None where it is not known."""
    kind = (device or jax.devices()[0]).device_kind
    matches = [tflops for name, tflops in PEAK_TFLOPS.items() if name.lower() in kind.lower()]
    return matches[0] * 1e12 if matches else None


def n_params(model: Model) -> int:
    """All parameters; a tied embedding counts once."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(model.shapes))


def matmul_params(model: Model) -> int:
    """Parameters that multiply every token: matrices and convolutions of the layers, and the head, tied or not."""
    total = model.config.vocab_size * model.config.dim
    axes, _ = jax.tree.flatten(model.axes["blocks"], is_leaf=is_axes)
    for names, x in zip(axes, jax.tree.leaves(model.shapes["blocks"]), strict=True):
        if len(x.shape) >= 3 and not TABLES.intersection(names):
            total += math.prod(x.shape)
    return total


def flops_per_token(model: Model, seq_len: int, *, train: bool = True) -> float:
    """FLOPs per token, averaged over a causal sequence of `seq_len`: forward, or a whole training step."""
    dense, blocks = 2.0 * matmul_params(model), model.abstract_blocks()
    if train:
        return 3 * dense + model.repeats * sum(block.train_flops_per_token(seq_len) for block in blocks)
    return dense + model.repeats * sum(block.flops_per_token(seq_len) for block in blocks)


def mfu(tokens_per_s: float, flops: float) -> float | None:
    """Share of the devices' peak that `tokens_per_s` at `flops` per token amounts to, None where it is not known."""
    peak = peak_flops()
    return None if peak is None else tokens_per_s * flops / (peak * jax.device_count())
