"""Refusals of the Triton backend: machine, dtypes and sizes.

It never falls back silently.
"""

import importlib
import importlib.util
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import kernels_pallas as kp
from kernels_pallas import backend, device, outside
from kernels_pallas.top1_chunk.triton import decode_refusal
from kernels_pallas.triton import limits, runtime
from tests.kernels.common import Shape, qkv


def problem(*, dtype="bfloat16", T=8, dim=64, platform="gpu", is_named=True, **options) -> backend.Problem:
    operand = jax.ShapeDtypeStruct((1, T, 2, dim), jnp.dtype(dtype))
    return backend.Problem(platform, (operand,) * 3, options, is_named)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)


def test_errors_name_the_limits(anywhere) -> None:
    assert limits.attention(problem()) is None
    assert limits.attention(problem(dtype="float32", dim=5)) is None
    assert re.search("float64; .*one dtype", str(limits.attention(problem(dtype="float64"))))
    assert re.search("head dim 160 .* 128", str(limits.attention(problem(dim=160))))
    mixed = problem()._replace(operands=(problem().operands[0], problem(dtype="float32").operands[0]))
    assert re.search("bfloat16 and float32; .*dtype", str(limits.attention(mixed)))
    assert decode_refusal(problem(chunk_size=256)) is None
    assert re.search("chunk_size 512 .* 256", str(decode_refusal(problem(chunk_size=512))))
    assert "by name" in str(limits.attention(problem(platform="cpu", is_named=False)))


def test_other_accelerators_refuse() -> None:
    assert re.search("NVIDIA GPU, .*tpu$", str(runtime.refusal("tpu")))


def test_a_cpu_without_the_interpreter_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "with TRITON_INTERPRET=1 set" in str(runtime.refusal("cpu"))
    if device.platform() == "cpu":
        q, k, v = qkv(Shape(T=10))
        with pytest.raises(kp.BackendError, match=r"triton: .*TRITON_INTERPRET=1.*xla: can run"):
            kp.top1_element_attention(q, k, v, implementation="triton")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "triton and torch: pip install 'seqjax[interpret]'" in str(runtime.refusal("cpu"))
    assert "CPU only" in str(runtime.refusal("gpu"))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "not installed" in str(runtime.refusal("gpu"))


def test_a_gpu_without_jax_triton_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    def fails(name):
        raise ImportError("E17.\nMore.")

    monkeypatch.setattr(importlib, "import_module", fails)
    refusal = str(runtime.refusal("gpu"))
    assert re.search(r"jax_triton .*\(E17\.\)", refusal)
    monkeypatch.setattr(importlib, "import_module", lambda name: object())


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Simulate a GPU with a compute capability and jax_triton installed."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda name: object() if name == "jax_triton" else real(name))
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    runtime._report_newer_gpu.cache_clear()
    return lambda capability: monkeypatch.setattr(device, "compute_capability", lambda: capability)


@pytest.mark.parametrize(
    ("capability", "reason"),
    [(None, "no compute"), (75, "7.5"), (80, None), (89, None), (90, None), (100, "10821"), (120, "10821")],
)
def test_tested_gpus_are_accepted(on_gpu, capability, reason) -> None:
    on_gpu(capability)
    refusal = runtime.refusal("gpu")
    assert refusal is None if reason is None else reason in str(refusal)


@pytest.mark.parametrize("capability", [75, 100, 120])
def test_an_untested_gpu_takes_another_backend(on_gpu, caplog, capability) -> None:
    """The default never fails, a named backend does; a newer GPU is logged once."""
    on_gpu(capability)
    q, k, v = (jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16),) * 3
    op = partial(kp.top1_chunk_attention, chunk_size=128)
    for _ in range(2):
        chosen_for(op, q, k, v)
        assert kp.backends_used()["top1_chunk_attention"] == "xla"
        with pytest.raises(kp.BackendError, match=f"capability {capability / 10}"):
            chosen_for(partial(op, implementation="triton"), q, k, v)
    assert sum("10821" in record.getMessage() for record in caplog.records) == (capability > device.HOPPER)


def chosen_for(op: Callable[..., Any], *operands: jax.ShapeDtypeStruct) -> None:
    """Trace an op, which chooses its backend; a new function avoids cached traces."""
    jax.eval_shape(lambda *x: op(*x), *operands)


@pytest.mark.parametrize("name", ["triton"])
def test_the_interpreter_runs_by_name_only(name) -> None:
    q, k, v = qkv(Shape(T=10))
    kp.top1_element_attention(q, k, v)
    assert kp.backends_used()["top1_element_attention"] == ("xla" if device.platform() == "cpu" else name)
    kp.top1_element_attention(q, k, v, implementation=name)
    assert kp.backends_used()["top1_element_attention"] == name


def test_double_precision_is_refused_by_name() -> None:
    with jax.enable_x64(True):
        q, k, v = qkv(Shape(T=10), dtype="float64")
        with pytest.raises(kp.BackendError, match=r"triton: (operands are float64|Triton)"):
            kp.top1_element_attention(q, k, v, implementation="triton")


def low(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((3, *shape), jnp.bfloat16)


def wide(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def wkv7(T: int) -> Any:
    def call(x, hidden, matrix, vector):
        maps = dict.fromkeys(("decay", "eta"), kp.LowRank(hidden, matrix, vector))
        return kp.wkv7_operands(x, x, x, **maps, **dict.fromkeys(("k_k_D", "k_a_D", "r_k_D"), vector))

    return call, (low(T, 16, 128), low(T, 32), wide(32, 2048), wide(2048))


def mamba3(T: int) -> Any:
    def call(x, turn, dt, bias, before, start):
        options = {"b_bias_HN": bias, "c_bias_HN": bias, "before_BN": before, "start_BHR": start}
        return kp.mamba3_operands(x, x, turn, dt, **options)

    return call, (low(T, 128), wide(3, T, 32), wide(3, T, 16), wide(16, 128), low(128), wide(3, 16, 32))


def kda(T: int) -> Any:
    def call(x, beta, rate, bias):
        return kp.kda(x, x, x, x, beta, rate_H=rate, bias_HK=bias, chunk_size=64)

    return call, (low(T, 16, 128), wide(3, T, 16), wide(16), wide(16, 128))


def shift(T: int) -> Any:
    moves = jax.ShapeDtypeStruct((2, 3, T, 2048), jnp.bfloat16)
    return lambda x, mu, moves: kp.token_shift(x, None, (mu, mu), moves), (low(T, 2048), wide(2048), moves)


def walk(T: int) -> Any:
    chunks = [jax.ShapeDtypeStruct((T // 128, 3, 16, 128, dim), jnp.bfloat16) for dim in (64, 64, 64)]
    own = wide(T // 128, 3, 16, 128, 64), wide(T // 128, 3, 16, 128)
    product = jax.ShapeDtypeStruct((T // 128, 3, 16, 64, 64), jnp.bfloat16)
    return lambda *xs: kp.path_walk(*xs[:4], own=xs[4:]), (*chunks, product, *own)


def states(T: int) -> Any:
    square = wide(T // 128, 3, 16, 128, 128)
    scan = partial(kp.state_scan, precision=jax.lax.Precision.HIGHEST)
    return scan, (wide(T // 128, 3, 16, 1), square, square, wide(3, 16, 128, 128))


M = 2**20  # tokens; 16 heads of 128 then give exactly 2^31 elements
# Maps each op to a function from token count to call, and the most tokens within 32-bit offsets. None: offsets are
# 64-bit, without a limit.
ENTRIES: dict[str, tuple[Callable[[int], Any], int | None]] = {
    "causal_attention": (lambda T: (kp.causal_attention, (low(T, 16, 128), *[low(T, 2, 128)] * 2, wide(3, T, 16))), M),
    "compressed_attention": (
        lambda T: (
            partial(kp.compressed_attention, block_size=64, top_k=15),
            (low(T, 16, 128), *[wide(3, T // 64, 2, 128)] * 2),
        ),
        M,
    ),
    "cross_entropy": (
        lambda T: (
            partial(kp.cross_entropy, dtype=jnp.dtype("bfloat16")),
            (wide(3, T, 2**17), jax.ShapeDtypeStruct((3, T), jnp.int32), wide(3, T)),
        ),
        None,
    ),
    # Limited by the pairs of positions within a chunk (64).
    "delta_rule": (lambda T: (partial(kp.delta_rule, chunk_size=64), (*[low(T, 16, 32)] * 3, wide(3, T, 16))), 2 * M),
    "delta_rule, wide values": (
        lambda T: (partial(kp.delta_rule, chunk_size=64), (*[low(T, 16, 64)] * 2, low(T, 16, 256), wide(3, T, 16))),
        M // 2,
    ),
    "head_norm": (lambda T: (lambda x, g: kp.head_norm(x, gain_HV=g, eps=1e-5), (low(T, 16, 128), wide(16, 128))), M),
    "index_loss": (
        lambda T: (
            partial(kp.index_loss, block_size=128),
            (low(T, 2, 64), low(T, 64), low(T, 16, 128), low(T, 2, 128), jax.ShapeDtypeStruct((3, T, 2, 7), jnp.int32)),
        ),
        M,
    ),
    "kda": (kda, M),
    "linear_attention": (
        lambda T: (partial(kp.linear_attention, chunk_size=64), (*[low(T, 16, 16)] * 3, wide(3, T, 16, 16))),
        2 * M,
    ),
    "log_linear": (
        lambda T: (
            partial(kp.log_linear, chunk_size=64),
            (low(T, 16, 128), wide(3, T, 16), *[low(T, 64)] * 2, wide(3, T, 16, 12)),
        ),
        M,
    ),
    "mamba3_operands": (mamba3, M),
    "path_attention": (
        lambda T: (kp.path_attention, (*[low(T, 16, 64)] * 3, wide(3, T, 16, 64), wide(3, T, 16))),
        2 * M,
    ),
    "path_walk": (walk, None),
    "select_chunk": (lambda T: (kp.select_chunk, (low(T, 16, 128), low(T, 2, 128))), M),
    "selective_scan": (
        lambda T: (
            kp.selective_scan,
            (low(T, 2048), wide(3, T, 2048), wide(2048, 16), *[low(T, 16)] * 2, wide(2048), wide(3, 2048, 16)),
        ),
        M,
    ),
    "short_conv": (lambda T: (partial(kp.short_conv, silu=True), (low(T, 2048), wide(2048, 4))), M),
    "ssd": (
        lambda T: (
            partial(kp.ssd, chunk_size=128),
            (low(T, 16, 128), wide(3, T, 16), *[low(T, 64)] * 2, wide(3, 16, 64, 128)),
        ),
        M,
    ),
    "state_scan": (states, None),
    "state_scan, elementwise": (
        lambda T: (
            kp.state_passing,
            (wide(3, T // 128, 16, 1, 1), wide(3, T // 128, 16, 128, 128), wide(3, 16, 128, 128)),
        ),
        None,
    ),
    "token_shift": (shift, M),
    "top1_chunk_attention": (lambda T: (kp.top1_chunk_attention, (low(T, 16, 128), *[low(T, 2, 128)] * 2)), M),
    "top1_chunk_decode": (
        lambda T: (
            partial(kp.top1_chunk_decode, length=T, selection="best_key"),
            (low(16, 128), *[low(T, 16, 128)] * 2),
        ),
        M,
    ),
    "top1_element_attention": (lambda T: (kp.top1_element_attention, (low(T, 16, 128), *[low(T, 2, 128)] * 2)), M),
    "top1_element_decode": (
        lambda T: (partial(kp.top1_element_decode, length=T), (low(16, 128), *[low(T, 16, 128)] * 2)),
        M,
    ),
    "wkv7_operands": (wkv7, M),
}


def test_every_op_has_an_entry() -> None:
    assert {name.partition(",")[0] for name in ENTRIES} == set(outside.OPS)


@pytest.mark.parametrize("name", ENTRIES)
def test_sizes_beyond_32_bit_offsets_are_refused(name, anywhere, monkeypatch) -> None:
    """Limits count the operands inside the op.

    They include intermediate results that the op writes.
    """

    class PickedError(Exception):
        pass

    others = backend.pick

    def pick(op, backends, implementation, operands, options, **_):
        if op != name.partition(",")[0]:
            return others(op, backends, "xla", operands, options)
        (triton,) = (one for one in backends if one.name == "triton")
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
        raise PickedError(triton.refusal(backend.Problem("gpu", shapes, options, is_named=True)))

    monkeypatch.setattr(backend, "pick", pick)
    call, most = ENTRIES[name]
    for n_tokens in (M // 4, *((16 * M,) if most is None else (most, most + 128, 16 * M))):
        function, operands = call(n_tokens)
        with pytest.raises(PickedError) as picked:
            jax.eval_shape(function, *operands)
        refusal = picked.value.args[0]
        if most is None or n_tokens <= most:
            assert refusal is None or "backward pass" in refusal, n_tokens
        else:
            assert "32-bit offsets reach 2,147,483,648" in refusal
