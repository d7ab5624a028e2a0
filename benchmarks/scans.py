"""Time recurrences, short convolutions, token shifts and norms by implementation, at 110m sizes:

    python -m benchmarks.scans [--quick] [--cases=delta_rule,gated_delta_rule] [--batch=16] [--seq_len=2048]

    ssd                                Mamba-2's recurrence: 24 heads of 64, state 128
    log_linear                         log-linear Mamba-2: 24 heads of 64, state 128, 12 levels
    selective_scan                     Mamba-1's recurrence: 1,536 channels, state 16
    selective_scan_softplus            the same, with the step size's softplus inside
    state_scan                         RWKV-7's states at chunk starts: 12 heads of 64 x 64, chunks of 64
    delta_rule, gated_delta_rule       8 heads of 96 x 96; 6 heads of 96 x 192
    wkv6, wkv7                         RWKV-6 and RWKV-7: 12 heads of 64 x 64
    gla, kda                           4 heads of 96 x 192; 6 heads of 128 x 128
    kda_gates                          KDA with its decays and gates: 6 heads of 128 x 128
    short_conv                         convolution of Mamba-1 and Mamba-2: 1,536 channels
    short_conv_norm, short_conv_v      Gated DeltaNet: q or k with norm, 6 heads of 96; v, 1,152 channels
    token_shift6, token_shift_moved    RWKV-7: 768 channels, 6 branches; RWKV-6: 5 branches, shares per token
    wkv7_operands                      RWKV-7's operands from its projections: 12 heads of 64, ranks 64, 64, 32
    norm_*                             norm, gate and additive terms after a recurrence
    norm_residual                      a block's RMSNorm with the residual addition: 768 channels
    path                               PaTH attention: 12 heads of 64

Each case is one layer, with 16-bit inputs where the mixer has them. Times are medians in ms for forward and for forward
with backward, all in one run. "difference" compares results and gradients with xla in float32 at full precision:
largest absolute difference / largest absolute entry. On a GPU, a profile adds the time in kernels, without gaps
between them, and "by_kernel" in the report has each kernel. With a torch with CUDA, the kernels of
flash-linear-attention (`fla`) and FlashQLA (`flash_qla`, with --dim=128) are timed too, if installed; their difference
covers results only. `--dim` uses 768 / dim heads of that dimension and omits xla's times. `--batch=1
--seq_len=102400` is one long sequence. Triton cuts its time axis into segments; use it with `--cases`. Results go to
benchmarks/results/scans.json; a quick or partial run writes to runs/benchmarks/.
"""

from benchmarks.harness import options

FLAGS = options.flags(__doc__, quick="small sizes, as on a CPU")
FLAGS.add_argument("--cases", type=options.words, default=[], help="only these cases; all by default")
FLAGS.add_argument("--batch", type=int, default=16, help="sequences (16)")
FLAGS.add_argument("--dim", type=int, default=0, help="dimension of keys and values, for cases with heads")
FLAGS.add_argument("--seq_len", type=int, default=2048, help="tokens per sequence (2048)")
options.parse_early(FLAGS, __name__)

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import report, torch_fla
from benchmarks.harness.machine import machine
from benchmarks.harness.timing import measure
from benchmarks.harness.trace import kernel_ms
from kernels_pallas import (
    BackendError,
    LowRank,
    ValueMix,
    delta_rule,
    head_norm,
    kda,
    linear_attention,
    log_linear,
    residual_norm,
    selective_scan,
    short_conv,
    ssd,
    state_scan,
    token_shift,
    wkv7_operands,
)
from seqjax.command_line import run_command
from seqjax.ops.path_attention import path_attention

CHANNEL_DECAYS = {"wkv6": (12, 64, 64), "wkv7": (12, 64, 64), "gla": (4, 96, 192), "kda": (6, 128, 128)}  # H, K, V
CONVOLUTIONS = {"short_conv": 1536, "short_conv_norm": 576, "short_conv_v": 1152}  # channels
SHIFTS = {"token_shift6": 6, "token_shift_moved": 5}  # branches
# H, V after a recurrence
NORMS = {
    "norm_gated_deltanet": (6, 192),
    "norm_mamba2": (24, 64),
    "norm_rwkv6": (12, 64),
    "norm_rwkv7": (12, 64),
    "norm_residual": (1, 768),
}
GATES = "kda_gates"
SELECTIVE = ("selective_scan", "selective_scan_softplus")
RECURRENCES = ("ssd", "log_linear", *SELECTIVE, "state_scan", "delta_rule", "gated_delta_rule", *CHANNEL_DECAYS, GATES)
IN_MOSAIC = ("delta_rule", "gated_delta_rule")  # have Pallas kernels for Hopper
BEFORE = "wkv7_operands"
CASES = (*RECURRENCES, *CONVOLUTIONS, *SHIFTS, BEFORE, *NORMS, "path")
TABLE = report.Table(
    26,
    (
        report.Column("forward_ms", "forward ms", ">12.3f"),
        report.Column("training_ms", "training ms", ">13.3f"),
        report.Column("device_forward_ms", "kernels, ms", ">12.3f"),
        report.Column("device_training_ms", "training", ">9.3f"),
        report.Column("compiled_bytes", "GiB", ">7.2f", 2**-30),
        report.Column("difference", "difference", ">12.1e"),
    ),
)


def normal(i: int, *shape: int, dtype: Any = jnp.float32, scale: float = 1.0) -> jax.Array:
    """Return the i-th operand."""
    return (scale * jax.random.normal(jax.random.key(i), shape)).astype(dtype)


def operands(case: str, B: int, T: int, *, small: bool, dim: int = 0) -> tuple[jax.Array, ...]:
    """Return the op's inputs in one mixer layer, at 110m sizes, laptop sizes, or head dimension `dim`."""
    half = partial(normal, dtype=jnp.float32 if small else jnp.bfloat16)
    if case == "ssd":
        H, V, N = (2, 8, 16) if small else (24, 64, 128)
        dt = jax.nn.softplus(normal(0, B, T, H) - 3)
        return half(1, B, T, H, V), -8 * dt, half(2, B, T, N), half(3, B, T, N), normal(4, B, H, N, V), dt
    if case == "log_linear":
        H, V, N, L = (2, 8, 16, 6) if small else (24, 64, 128, 12)
        log_a, m = -jax.nn.softplus(normal(0, B, T, H) - 3), jax.nn.softplus(normal(4, B, T, H, L))
        return half(1, B, T, H, V), log_a, half(2, B, T, N), half(3, B, T, N), m
    if case in SELECTIVE:
        E, N = (32, 4) if small else (1536, 16)
        has_bias, decay = case == "selective_scan_softplus", -jnp.exp(normal(1, E, N))
        dt = half(0, B, T, E) if has_bias else jax.nn.softplus(normal(0, B, T, E) - 3)
        inputs = (half(2, B, T, E), dt, decay, half(3, B, T, N), half(4, B, T, N), normal(5, E), normal(6, B, E, N))
        return (*inputs, jnp.full(E, -3.0)) if has_bias else inputs
    if case in ("delta_rule", "gated_delta_rule"):
        is_gated = case == "gated_delta_rule"
        H, K, V = (2, 8, 16) if small else (6, 96, 192) if is_gated else (8, 96, 96)
        H, K, V = (768 // dim, dim, dim) if dim else (H, K, V)
        k = normal(0, B, T, H, K)
        q, v = half(1, B, T, H, K, scale=1 / K), half(2, B, T, H, V)
        k = (k / jnp.linalg.norm(k, axis=-1, keepdims=True)).astype(q.dtype)
        inputs = (q, k, v, jax.nn.sigmoid(normal(3, B, T, H)), normal(4, B, H, K, V))
        return (*inputs, -jax.nn.softplus(normal(5, B, T, H))) if is_gated else inputs
    if case == "path":
        H, K = (2, 16) if small else (12, 64)
        w = normal(3, B, T, H, K)
        data = [half(i, B, T, H, K) for i in range(3)]
        return *data, w / jnp.linalg.norm(w, axis=-1, keepdims=True), 2 * jax.nn.sigmoid(normal(4, B, T, H))
    if case in CONVOLUTIONS:
        E = 12 if small else CONVOLUTIONS[case]
        taps = half(1, B, T, E), normal(2, E, 4, scale=0.5)
        return (*taps, normal(3, E)) if case == "short_conv" else taps
    if case in SHIFTS:
        N, D = SHIFTS[case], 12 if small else 768
        shared = half(0, B, T, D), jax.nn.sigmoid(normal(1, N, D))
        return shared if case == "token_shift6" else (*shared, half(2, N, B, T, D, scale=0.1))
    if case == BEFORE:
        (H, K), ranks = ((2, 8), (4, 4, 4)) if small else ((12, 64), (64, 64, 32))
        data = [half(i, B, T, H, K) for i in range(4)]
        maps = [(half(4, B, T, n), normal(5, n, H * K, scale=n**-0.5), normal(6, H * K)) for n in ranks]
        return (*data, *(x for map_ in maps for x in map_), *(1 + normal(7, 3, H * K, scale=0.1)))
    if case == GATES:
        H, K = (2, 8) if small else (6, 128)
        H, K = (768 // dim, dim) if dim else (H, K)
        v, decay, k = half(2, B, T, H, K), half(3, B, T, H, K), normal(0, B, T, H, K)
        k = (k / jnp.linalg.norm(k, axis=-1, keepdims=True)).astype(v.dtype)
        gates = decay, jax.nn.sigmoid(normal(4, B, T, H)), normal(5, B, H, K, K)
        return half(1, B, T, H, K, scale=1 / K), k, v, *gates, jnp.exp(normal(6, H)), normal(7, H, K) - 3
    if case in CHANNEL_DECAYS:
        H, K, V = (2, 8, 8) if small else CHANNEL_DECAYS[case]
        H, K, V = (768 // dim, dim, dim) if dim else (H, K, V)
        r, v, log_w = (
            half(1, B, T, H, K, scale=1 / K),
            half(2, B, T, H, V),
            -0.6 * jax.nn.sigmoid(normal(3, B, T, H, K)),
        )
        k, initial = half(0, B, T, H, K, scale=K**-0.5), normal(4, B, H, K, V)
        if case == "wkv6":
            return r, k, v, log_w, initial, normal(5, H, K)
        if case == "gla":
            return r, k, v, log_w, initial
        unit = normal(6, B, T, H, K)
        unit = unit / jnp.linalg.norm(unit, axis=-1, keepdims=True)
        step = jax.nn.sigmoid(normal(7, B, T, H, K if case == "wkv7" else 1))
        a = -unit if case == "wkv7" else -jnp.exp(log_w) * unit
        b = (step * unit).astype(r.dtype)
        a = a.astype(r.dtype)
        return (r, k, v, log_w, initial, a, b) if case == "wkv7" else (r, b, v, log_w, initial, a)
    if case in NORMS:
        H, V = (2, 8) if small else NORMS[case]
        x, gate, gain = half(0, B, T, H, V), half(1, B, T, H, V), normal(2, H, V)
        if case == "norm_residual":
            return x[:, :, 0], gain[0]
        if case == "norm_gated_deltanet":
            return x, gate, gain[:1]
        if case == "norm_rwkv6":
            return x, gate, gain, normal(3, H, V)
        skip = (half(4, B, T, H, V), normal(5, *((1, 1) if case == "norm_mamba2" else (B, T)), H))
        return (x, gate, gain, *skip) if case == "norm_mamba2" else (x, gate, gain, normal(3, H, V), *skip)
    H, K = (2, 8) if small else (12, 64)
    n_chunks = -(-T // 64)
    decay = jax.nn.sigmoid(normal(0, n_chunks, B, H, K))
    products = normal(1, n_chunks, B, H, K, K, scale=0.5 / K)
    return decay, products, normal(2, n_chunks, B, H, K, K), normal(3, B, H, K, K)


def function(case: str, implementation: str) -> Callable:
    """Return the op as a function of its operands."""
    if case in NORMS:
        norm = partial(
            head_norm,
            activation="none" if case == "norm_rwkv7" else "silu",
            gate_first=case == "norm_mamba2",
            eps=1e-5,
            implementation=implementation,
        )
        if case == "norm_residual":
            return lambda x, gain: residual_norm(x, gain_D=gain, eps=1e-5, implementation=implementation)
        if case == "norm_mamba2":
            return lambda x, gate, gain, *skip: norm(x, gate, skip, gain_HV=gain)
        return lambda x, gate, gain, bias=None, *skip: norm(x, gate, skip or None, gain_HV=gain, bias_HV=bias)
    if case == "ssd":
        return partial(ssd, chunk_size=128, implementation=implementation)
    if case == "log_linear":
        return partial(log_linear, chunk_size=64, implementation=implementation)
    if case in SELECTIVE:
        scan = partial(selective_scan, implementation=implementation)
        return lambda *inputs: scan(*inputs[:7], dt_bias_E=inputs[7] if len(inputs) > 7 else None)
    if case in ("delta_rule", "gated_delta_rule"):
        run = partial(delta_rule, chunk_size=64, implementation=implementation)
        return lambda q, k, v, beta, initial, log_g=None: run(q, k, v, beta, log_g, initial)
    if case == "path":
        return partial(path_attention, implementation=implementation)
    if case in CONVOLUTIONS:
        heads = 6 if case == "short_conv_norm" else None
        return partial(short_conv, silu=True, l2_heads=heads, implementation=implementation)
    if case in SHIFTS:
        return lambda x, mu, moves=None: token_shift(x, None, tuple(mu), moves, implementation=implementation)
    if case == BEFORE:

        def before(r: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, *more: jax.Array) -> Any:
            decay, eta, share = (LowRank(*more[i : i + 3]) for i in (0, 3, 6))
            vectors = dict(zip(("k_k_D", "k_a_D", "r_k_D"), more[9:], strict=True))
            mix = ValueMix(first, share, jnp.asarray(False))
            return wkv7_operands(r, k, v, decay=decay, eta=eta, **vectors, mix=mix, implementation=implementation)

        return before
    if case == GATES:
        run = partial(kda, chunk_size=64, implementation=implementation)
        return lambda *inputs: run(*inputs[:6], rate_H=inputs[6], bias_HK=inputs[7])
    if case in CHANNEL_DECAYS:
        attend = partial(linear_attention, chunk_size=64, implementation=implementation)
        if case in ("wkv6", "gla"):
            return lambda r, k, v, log_w, initial, u=None: attend(r, k, v, log_w, u, initial)
        if case == "kda":
            return lambda r, k, v, log_w, initial, a: attend(r, k, v, log_w, None, initial, low_rank=(a, None))
        attend = partial(attend, min_log_w=-math.exp(-0.5))
        return lambda r, k, v, log_w, initial, a, b: attend(r, k, v, log_w, None, initial, low_rank=(a, b))
    return partial(state_scan, precision=jax.lax.Precision.DEFAULT, implementation=implementation)


def implementations(case: str, inputs: Sequence[jax.Array], dim: int) -> list[str]:
    """Return the implementations to time here: on a GPU all kernels, and xla without a dim."""
    if jax.default_backend() != "gpu":
        return ["xla"]
    names = ["triton"] if dim else ["triton", "xla"]
    if case in IN_MOSAIC:
        with contextlib.suppress(BackendError):  # a GPU other than Hopper
            jax.eval_shape(function(case, "pallas"), *inputs)
            names.insert(0, "pallas")
    return names


def difference(got: Any, want: Any) -> float:
    """Return the largest difference over all leaves / the largest entry."""

    def of(a: jax.Array, b: jax.Array) -> float:
        return float(jnp.abs(a.astype(jnp.float32) - b).max() / jnp.abs(b).max())

    return max(of(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))


def in_kernels(forward: Callable[[], Any], training: Callable[[], Any]) -> dict[str, Any]:
    """Return the profiled kernel times in ms, in total and by kernel: forward, and forward with backward.

    After torch's profiler, JAX's profiles have no kernels in the same process. The result is then empty.
    """
    of_forward, of_training = kernel_ms(forward), kernel_ms(training)
    if not of_forward:
        return {}
    return {
        "device_forward_ms": sum(of_forward.values()),
        "device_training_ms": sum(of_training.values()),
        "by_kernel": {"forward": of_forward, "training": of_training},
    }


def run(case: str, B: int, T: int, *, small: bool, dim: int, repeats: int, call_s: float) -> dict[str, dict[str, Any]]:
    """Return times in ms, bytes, and difference from xla in float32, by implementation."""
    inputs = operands(case, B, T, small=small, dim=dim)
    wide = [x.astype(jnp.float32) for x in inputs]

    def both(f: Callable) -> Callable:
        def call(cotangent, *arrays):
            out, pull = jax.vjp(f, *arrays)
            return out, pull(cotangent)

        return jax.jit(call)

    shapes = jax.eval_shape(function(case, "xla"), *inputs)
    cotangent = jax.tree.map(lambda t: normal(7, *t.shape, dtype=t.dtype), shapes)
    with jax.default_matmul_precision("highest"):
        want = both(function(case, "xla"))(jax.tree.map(lambda t: t.astype(jnp.float32), cotangent), *wide)
    rows: dict[str, dict[str, Any]] = {}
    for name in implementations(case, inputs, dim):
        f = jax.jit(function(case, name))
        train = both(f)
        forward = measure(f, inputs, repeats=repeats, seconds=call_s)
        training = measure(train, (cotangent, *inputs), repeats=repeats, seconds=call_s)
        rows[name] = {
            "forward_ms": forward["ms"],
            "training_ms": training["ms"],
            "compiled_bytes": training["compiled_bytes"],
            "difference": difference(train(cotangent, *inputs), want),
        }
        if jax.default_backend() == "gpu":
            rows[name] |= in_kernels(partial(f, *inputs), partial(train, cotangent, *inputs))
    for package in torch_fla.available(case, dim):
        row = torch_fla.measure(package, case, inputs, cotangent, repeats=repeats, seconds=call_s)
        rows[package] = row | {"difference": difference(row.pop("out"), want[0])}
    return rows


def main(argv: list[str]) -> None:
    """Measure all cases; print and write after each."""
    args = FLAGS.parse_args(argv)
    cases = args.cases or (tuple(torch_fla.FLA) if args.dim else CASES)
    options.check_known("cases", cases, CASES)
    small = args.quick or jax.default_backend() == "cpu"
    B, T = (2, 256) if small else (args.batch, args.seq_len)
    written: dict[str, Any] = {
        "machine": machine(),
        "settings": {"batch": B, "seq_len": T, "dim": args.dim},
        "results": {},
    }
    path = options.destination(args.json, "scans", recorded=not (small or args.cases or args.dim))
    print(TABLE.header())
    for case in cases:
        written["results"][case] = run(case, B, T, small=small, dim=args.dim, repeats=5, call_s=0.02 if small else 0.1)
        for name, row in written["results"][case].items():
            print(TABLE.row(f"{case} {name}", row), flush=True)
        report.save(path, written)
    print(f"Wrote {path}.")


if __name__ == "__main__":
    run_command(main)
