"""Why the Triton backend refuses, and that it says so: machine, dtypes, sizes; never a silent fallback."""

import importlib
import importlib.util

import jax
import jax.numpy as jnp
import pytest

import kernels_pallas as kp
from kernels_pallas import backend, device
from kernels_pallas.top1_chunk.triton import decode_refusal
from kernels_pallas.triton import limits, runtime
from tests.kernels.common import Shape, qkv


def problem(*, dtype="bfloat16", T=8, dim=64, platform="gpu", is_named=True, **options) -> backend.Problem:
    operand = jax.ShapeDtypeStruct((1, T, 2, dim), jnp.dtype(dtype))
    return backend.Problem(platform, (operand,) * 3, options, is_named)


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)


def test_limits_are_named(anywhere) -> None:
    assert limits.attention(problem()) is None
    assert limits.attention(problem(dtype="float32", dim=5)) is None
    assert "float64; it takes one dtype for all" in str(limits.attention(problem(dtype="float64")))
    assert "head dim 160 is larger than 128" in str(limits.attention(problem(dim=160)))
    mixed = problem()._replace(operands=(problem().operands[0], problem(dtype="float32").operands[0]))
    assert "bfloat16 and float32; it takes one dtype" in str(limits.attention(mixed))
    assert decode_refusal(problem(chunk_size=256)) is None
    assert "chunk_size 512 is larger than 256" in str(decode_refusal(problem(chunk_size=512)))
    assert "selected by name" in str(limits.attention(problem(platform="cpu", is_named=False)))


def test_other_accelerators_refuse() -> None:
    assert runtime.refusal("tpu") == "Triton kernels need an NVIDIA GPU, this is a tpu"


def test_a_cpu_without_the_interpreter_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "with TRITON_INTERPRET=1 set" in str(runtime.refusal("cpu"))
    if device.platform() == "cpu":
        q, k, v = qkv(Shape(T=10))
        with pytest.raises(kp.BackendError, match=r"triton: Triton kernels need a GPU.*xla: can run this"):
            kp.top1_element_attention(q, k, v, implementation="triton")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "needs triton and torch: pip install 'seqjax[interpret]'" in str(runtime.refusal("cpu"))
    assert "the interpreter runs on a CPU only" in str(runtime.refusal("gpu"))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "triton is not installed" in str(runtime.refusal("gpu"))


def test_a_gpu_without_jax_triton_or_too_old_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    def fails(name):
        raise ImportError("jax-triton requires JAX to be installed with GPU support.\nMore.")

    monkeypatch.setattr(importlib, "import_module", fails)
    refusal = str(runtime.refusal("gpu"))
    assert "jax_triton does not import (jax-triton requires JAX to be installed with GPU support.)" in refusal
    monkeypatch.setattr(importlib, "import_module", lambda name: object())
    for capability, said in ((75, "compute capability 7.5"), (None, "names no compute capability")):
        monkeypatch.setattr(device, "compute_capability", lambda capability=capability: capability)
        assert said in str(runtime.refusal("gpu"))
    monkeypatch.setattr(device, "compute_capability", lambda: 80)
    assert runtime.refusal("gpu") is None


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
        with pytest.raises(kp.BackendError, match=r"triton: (operands are float64|Triton kernels need|Triton's)"):
            kp.top1_element_attention(q, k, v, implementation="triton")
