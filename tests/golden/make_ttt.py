"""Makes ttt_linear.npz: TTT-Linear from its equations in float64 numpy, with gradients.

    python -m tests.golden.make_ttt

`tests.models.oracle.ttt_linear` gives the outputs, token by token. The gradients are complex-step derivatives: the
imaginary part of the loss after an imaginary step of one number. `TTTLinear` of test-time-training/ttt-lm-jax at
6f529b1 was run in float64 with the same parameters: outputs agree to 1e-15, gradients to the rounding of the archive.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np

from tests.models import oracle

HERE, BATCH, TIME, DIM, HEADS, SIZE = Path(__file__).parent, 2, 37, 8, 2, 16
SETTINGS = SimpleNamespace(heads=HEADS, mini_batch=SIZE, base_lr=1.0, conv=True, gate=True, norm_eps=1e-6)
STEP = 1e-30
SHAPES = {
    **{f"{name}.w": (DIM, DIM) for name in ("q", "v", "gate", "out")},
    **{f"{name}_conv.{part}": shape for name in "qk" for part, shape in (("w", (DIM, 4)), ("b", (DIM,)))},
    **{f"{name}.{part}": (DIM,) for name in ("norm", "inner_norm") for part in "gb"},
    "rate.w": (DIM, HEADS), "rate.b": (HEADS,), "token_M": (SIZE,), "b_E": (DIM,),
    "w_HKK": (HEADS, DIM // HEADS, DIM // HEADS),
}  # fmt: skip


def outputs(arrays: dict[str, np.ndarray]) -> np.ndarray:
    p: dict = {}
    for name, x in arrays.items():
        module, _, part = name.rpartition(".")
        (p.setdefault(module, {}) if module else p)[part] = x
    return np.stack([oracle.ttt_linear(SETTINGS, p, x_TD) for x_TD in p.pop("x")])


def gradient(arrays: dict[str, np.ndarray], name: str, weight: np.ndarray) -> np.ndarray:
    found = np.zeros(arrays[name].shape)
    for at in np.ndindex(found.shape):
        moved = {key: x.astype(np.complex128) for key, x in arrays.items()}
        moved[name][at] += 1j * STEP
        found[at] = np.sum(outputs(moved) * weight).imag / STEP
    return found


def main() -> None:
    rng = np.random.default_rng(0)
    arrays = {name: 0.5 * rng.standard_normal(shape) + name.endswith(".g") for name, shape in SHAPES.items()}
    arrays |= {"x": rng.standard_normal((BATCH, TIME, DIM)), "token_M": 0.3 * rng.standard_normal(SIZE)}
    arrays = {name: x.astype(np.float32).astype(np.float64) for name, x in arrays.items()}
    weight = rng.standard_normal((BATCH, TIME, DIM)).astype(np.float32).astype(np.float64)
    kept = {"x": arrays["x"], "y": outputs(arrays), "weight": weight, "dx": gradient(arrays, "x", weight)}
    kept |= {f"p.{name}": arrays[name] for name in SHAPES}
    kept |= {f"g.{name}": gradient(arrays, name, weight) for name in SHAPES}
    np.savez_compressed(HERE / "ttt_linear.npz", **{name: x.astype(np.float32) for name, x in kept.items()})


if __name__ == "__main__":
    main()
