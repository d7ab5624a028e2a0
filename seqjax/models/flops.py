"""Model FLOPs per token, peak rates of known devices, and MFU.

The forward pass takes 2 FLOPs per matrix parameter (embeddings and position tables are looked up, not multiplied), plus
the mixer's count. The mixer counts only the work that its mask, window or selection requires. Training takes three
times the forward pass, unless a mixer's `train_flops_per_token` differs (a selection has no backward). MFU is model
FLOPs utilisation.
"""

import math
from typing import Any

import jax

from seqjax.models.language_model import Model
from seqjax.sharding import is_axes

# Dense bf16 peak per device in TFLOP/s (vendors' datasheets), by a substring of `device_kind`.
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

# Axes of parameters that are looked up or broadcast, not multiplied.
TABLES = {"positions", "state"}


def peak_flops(device: Any = None) -> float | None:
    """Return a device's peak dense bf16 FLOP/s, or None if it is unknown.

    The default is the first device.
    """
    kind = (device or jax.devices()[0]).device_kind
    matches = [tflops for name, tflops in PEAK_TFLOPS.items() if name.lower() in kind.lower()]
    return matches[0] * 1e12 if matches else None


def n_params(model: Model) -> int:
    """Return the number of parameters; a tied embedding counts once."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(model.shapes))


def matmul_params(model: Model) -> int:
    """Return the number of parameters that multiply every token.

    These are the layers' matrices and convolutions, and the head.
    """
    total = model.config.vocab_size * model.config.dim
    axes, _ = jax.tree.flatten(model.axes["blocks"], is_leaf=is_axes)
    for names, x in zip(axes, jax.tree.leaves(model.shapes["blocks"]), strict=True):
        if len(x.shape) >= 3 and not TABLES.intersection(names):
            total += math.prod(x.shape)
    return total


def flops_per_token(model: Model, seq_len: int, *, train: bool = True) -> float:
    """Return the FLOPs per token of a training step or a forward pass.

    They are averaged over a sequence of `seq_len` tokens.
    """
    dense, blocks = 2.0 * matmul_params(model), model.abstract_blocks()
    if train:
        return 3 * dense + model.repeats * sum(block.train_flops_per_token(seq_len) for block in blocks)
    return dense + model.repeats * sum(block.flops_per_token(seq_len) for block in blocks)


def mfu(tokens_per_s: float, flops: float) -> float | None:
    """Return MFU: `tokens_per_s` * `flops` over the peak of all devices.

    None if the peak is unknown.
    """
    peak = peak_flops()
    return None if peak is None else tokens_per_s * flops / (peak * jax.device_count())
