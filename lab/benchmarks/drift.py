"""Measure the error of bfloat16 compute against float32, per architecture.

    python -m lab.benchmarks.drift [--mixers=a,b] [--size=debug]

The same float32 parameters and tokens run with `model.dtype` float32 (at the highest matmul precision) and bfloat16.
The script reports the difference in mean loss (nats), and the L2 differences |x_bf16 - x_fp32| / |x_fp32| of all logits
and all gradients. It runs each file in configs/ at the debug width with two layers (Based: one pattern of five layers).

Parameters are initial values plus N(0, 0.1^2), about the size after training at width 64. At initialisation, attention
is uniform and gates are half open, so errors would be small. Tokens are random.

Expected errors: bfloat16 rounds to 8 bits, u = 2^-8 = 0.4%. With `ROUNDINGS` consecutive roundings per layer and L
layers, let n = L * ROUNDINGS. Without amplification, the logit error is at most about n u, or about sqrt(n) u for
independent roundings. Gradients pass the layers twice. No such bound holds with a discrete choice (of keys, chunks or
blocks), because rounding can change a whole output. Its bound is sqrt(2), the value for two unrelated vectors of equal
length.

Writes benchmarks/results/drift.json (partial runs: runs/benchmarks/) and prints a Markdown table.
"""

from benchmarks.harness import options

FLAGS = options.flags(__doc__)
FLAGS.add_argument("--mixers", type=options.words, default=[], help="only these configs; all by default")
FLAGS.add_argument("--size", default="debug", help="size of the configs (debug)")
options.parse_early(FLAGS, __name__)

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import report
from benchmarks.harness.configs import chosen
from benchmarks.harness.machine import machine
from seqjax.command_line import run_command
from seqjax.config import Config, from_config_dict, presets
from seqjax.models import Model
from seqjax.types import Array, Params

U = 2.0**-8  # unit roundoff of bfloat16
# Consecutive roundings per layer: norm, projection, position or convolution, core, norm or gate, output, residual; then
# norm, up, activation, product, down, residual. These are 13; the largest cores add 3 (kernels, their sums, bonus).
ROUNDINGS = 16
CHOOSES = ("dsa", "moba", "msa", "nsa", "top1_chunk", "top1_element", "rwkv7_shell")  # the shell has Top-1 Chunk
NOISE = 0.1


def bounds(name: str, layers: int) -> tuple[float, float]:
    """Return upper bounds for the relative L2 differences of logits and gradients."""
    if name in CHOOSES:
        return 2**0.5, 2**0.5
    return layers * ROUNDINGS * U, 2 * layers * ROUNDINGS * U


def configured(name: str, size: str, dtype: str, seq_len: int | None = None) -> Config:
    """Return the shipped config with two layers, or one whole pattern, and compute dtype `dtype`."""
    config: Any = presets.read_config(f"{name}:{size}")
    config.model.n_layers = len(config.model.mixer) if isinstance(config.model.mixer, tuple) else 2
    config.model.dtype = dtype
    config.train.seq_len = seq_len or config.train.seq_len
    return from_config_dict(config)


def noisy(params: Params, key: Any) -> Params:
    """Return the parameters plus N(0, NOISE^2), float32."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        tree, [x + NOISE * jax.random.normal(k, x.shape, x.dtype) for x, k in zip(leaves, keys, strict=True)]
    )


def relative(got: Any, want: Any) -> float:
    """Return |got - want| / |want| over all leaves together, in float64."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    squares = [(np.square(np.float64(a) - np.float64(b)).sum(), np.square(np.float64(b)).sum()) for a, b in pairs]
    return float(np.sqrt(sum(d for d, _ in squares) / sum(w for _, w in squares)))


def outputs(config: Config, params: Params, tokens_BT1: Array) -> tuple[Array, Array, Params]:
    """Return mean loss, logits and gradients."""
    model = Model(config.model, max_len=config.train.seq_len)

    def mean_loss(params: Params) -> Array:
        total, count = model.loss(params, tokens_BT1)
        return total / count

    with jax.default_matmul_precision("highest"):
        loss, grads = jax.jit(jax.value_and_grad(mean_loss))(params)
        return loss, jax.jit(model.logits)(params, tokens_BT1[:, :-1]), grads


def measure(name: str, size: str = "debug", seq_len: int | None = None) -> dict[str, Any]:
    """Return one table row, float32 against bfloat16; `seq_len` defaults to the config's length."""
    configs = [configured(name, size, dtype, seq_len) for dtype in ("float32", "bfloat16")]
    train, vocab = configs[0].train, configs[0].model.vocab_size
    model = Model(configs[0].model, max_len=train.seq_len)
    params = noisy(jax.jit(model.init)(jax.random.key(0)), jax.random.key(1))
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, vocab, (4, train.seq_len + 1), np.int32))
    (loss, logits, grads), (loss_16, logits_16, grads_16) = (outputs(config, params, tokens) for config in configs)
    for_logits, for_grads = bounds(name, configs[0].model.n_layers)
    return {
        "layers": configs[0].model.n_layers,
        "loss": float(loss),
        "loss_difference": float(loss_16) - float(loss),
        "logits": relative(logits_16, logits),
        "largest_logit_difference": float(jnp.abs(logits_16 - logits).max()),
        "gradients": relative(grads_16, grads),
        "logits_bound": for_logits,
        "gradients_bound": for_grads,
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table; relative differences are in percent."""
    rows = [
        (
            f"`{name}`",
            f"{r['layers']}",
            f"{r['loss']:.3f}",
            f"{r['loss_difference']:+.4f}",
            f"{r['logits']:.2%}",
            f"{r['gradients']:.2%}",
        )
        for name, r in results.items()
    ]
    return report.markdown(("mixer", "layers", "loss (fp32)", "loss, bf16 - fp32", "logits", "gradients"), rows)


def main(argv: list[str]) -> None:
    """Measure each model; print and write each result."""
    args = FLAGS.parse_args(argv)
    settings = {"size": args.size, "noise": NOISE}
    written: dict[str, Any] = {"machine": machine(), "settings": settings, "results": {}}
    path = options.destination(args.json, "drift", recorded=not args.mixers)
    for name in chosen(args.mixers):
        result = written["results"][name] = measure(name, args.size)
        print(name, {key: f"{value:.4g}" for key, value in result.items()}, flush=True)
        report.save(path, written)
    print(table(written["results"]))
    print(f"Wrote {path}.")


if __name__ == "__main__":
    run_command(main)
