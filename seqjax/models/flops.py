"""Model FLOPs per token, peak rates of known devices, and MFU (model FLOPs utilisation).

The forward pass takes 2 per parameter of a matrix (embeddings and position tables are looked up, not multiplied), plus
the mixer's own count. The latter includes only the work that its mask, window or selection requires. Training takes
three times the forward pass, unless a mixer's `train_flops_per_token` differs (a selection has no backward).
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
    """Return the peak dense bf16 FLOP/s of a device (by default the first one), or None if it is unknown."""
    kind = (device or jax.devices()[0]).device_kind
    matches = [tflops for name, tflops in PEAK_TFLOPS.items() if name.lower() in kind.lower()]
    return matches[0] * 1e12 if matches else None


def n_params(model: Model) -> int:
    """Return the number of parameters; a tied embedding counts once."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(model.shapes))


def matmul_params(model: Model) -> int:
    """Return the number of parameters that multiply every token: matrices and convolutions of layers, and the head."""
    total = model.config.vocab_size * model.config.dim
    axes, _ = jax.tree.flatten(model.axes["blocks"], is_leaf=is_axes)
    for names, x in zip(axes, jax.tree.leaves(model.shapes["blocks"]), strict=True):
        if len(x.shape) >= 3 and not TABLES.intersection(names):
            total += math.prod(x.shape)
    return total


def flops_per_token(model: Model, seq_len: int, *, train: bool = True) -> float:
    """Return the FLOPs per token of a training step, or of a forward pass, averaged over a sequence of `seq_len`."""
    dense, blocks = 2.0 * matmul_params(model), model.abstract_blocks()
    if train:
        return 3 * dense + model.repeats * sum(block.train_flops_per_token(seq_len) for block in blocks)
    return dense + model.repeats * sum(block.flops_per_token(seq_len) for block in blocks)


def mfu(tokens_per_s: float, flops: float) -> float | None:
    """Return MFU, the ratio of `tokens_per_s` * `flops` to the peak of all devices, or None if that is unknown."""
    peak = peak_flops()
    return None if peak is None else tokens_per_s * flops / (peak * jax.device_count())
