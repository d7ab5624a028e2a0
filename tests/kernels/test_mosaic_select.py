"""Pallas Mosaic GPU selection: values, CUDA lowering, refusals, exponentials.

Values are interpreted. The interpreter does not model asynchronous `wgmma`, so only a GPU reveals reads that come too
early.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas import backend, device, mosaic_gpu
from kernels_pallas.select_chunk import mosaic_gpu as backend_of_mosaic
from kernels_pallas.select_chunk import reference
from tests.kernels.common import Shape, assert_selection, qkv

pallas = pytest.importorskip(
    "kernels_pallas.select_chunk.mosaic_gpu.select", reason="this jax has no Pallas Mosaic GPU"
)
masses = pytest.importorskip("kernels_pallas.select_chunk.mosaic_gpu.masses")

refusal = mosaic_gpu.refusal("cpu")
interpreted = pytest.mark.skipif(
    refusal is not None or jax.default_backend() != "cpu", reason=refusal or "the interpreter runs on a CPU"
)
SMALL = Shape(B=1, T=330, R=2, G=1, K=64, V=1, C=64)
TILE = pallas.Tiles(rows=64, groups=2, stages=2)


def check(shape: Shape, q, k, sel, **rule) -> None:
    q, k = (np.asarray(x, np.float32) for x in (q, k))
    score = jax.jit(partial(reference.chunk_scores, chunk_size=shape.C, **rule))(q, k)
    assert_selection(np.asarray(sel), np.asarray(score), shape.C)


@interpreted
@pytest.mark.parametrize("gain", [1.0, 30.0], ids=["bounded", "unbounded"])
def test_equals_reference(gain) -> None:
    q, k, _ = qkv(SMALL, dtype="bfloat16", gain=gain)
    run = partial(pallas.exact, chunk_size=SMALL.C, scale=SMALL.K**-0.5, tile=TILE, interpret=True)
    check(SMALL, q, k, jax.jit(run)(q, k))


@interpreted
@pytest.mark.parametrize("scale", [0.125, -2.0, 0.0])
def test_best_key_equals_reference(scale) -> None:
    """Scores far above 0, far below 0 and equal are compared without a bound."""
    q, k, _ = qkv(SMALL, dtype="bfloat16", gain=30.0)
    run = partial(pallas.best_key, chunk_size=SMALL.C, scale=scale, tile=TILE, interpret=True)
    check(SMALL, q, k, jax.jit(run)(q, k), selection="best_key", scale=scale)


@interpreted
@pytest.mark.parametrize("selection", ["exact", "best_key"])
@pytest.mark.parametrize(
    "shape",
    [
        SMALL._replace(B=2, T=129, G=2, R=1),
        SMALL._replace(T=257, C=128, K=128),
        SMALL._replace(T=640, C=256, R=1),
        SMALL._replace(T=64),
        SMALL._replace(T=40),
    ],
    ids=str,
)
def test_by_name_on_a_cpu(shape, selection) -> None:
    q, k, _ = qkv(shape, dtype="float16")
    sel = kp.select_chunk(q, k, chunk_size=shape.C, selection=selection, implementation="pallas")
    check(shape, q, k, sel, selection=selection)
    assert kp.backends_used()["select_chunk"] == "pallas"


@interpreted
@pytest.mark.parametrize(
    ("selection", "gain"),
    [("exact", 1.0), ("exact", 30.0), ("best_key", 1.0)],
    ids=["bounded", "unbounded", "best_key"],
)
def test_ties_go_to_the_smallest_chunk_also_under_vmap(selection, gain) -> None:
    q, k, _ = qkv(SMALL, dtype="bfloat16", gain=gain)
    k = jnp.tile(k[:, : SMALL.C], (1, 6, 1, 1))[:, : SMALL.T]
    select = partial(kp.select_chunk, chunk_size=SMALL.C, selection=selection, implementation="pallas")
    sel = jax.vmap(select)(jnp.stack([q, -q]), jnp.stack([k, k]))
    np.testing.assert_array_equal(sel[:, :, SMALL.C :], 0)
    np.testing.assert_array_equal(sel[:, :, : SMALL.C], -1)


@pytest.mark.parametrize(
    ("selection", "chunk_size", "kernels"),
    [("exact", 128, 2), ("best_key", 128, 1), ("best_key", 320, 1)],
)
def test_lowers_for_cuda(selection, chunk_size, kernels) -> None:
    """Mosaic compiles every kernel to a GPU module.

    It raises here if it cannot lower one. exact has one kernel for bounded scores and one for others.
    """
    select = partial(getattr(pallas, selection), chunk_size=chunk_size, scale=0.1, interpret=False)
    q, k = (jax.ShapeDtypeStruct((1, 1001, heads, 64), jnp.bfloat16) for heads in (4, 2))

    def layers(q, k):
        return select(q, k), select(2 * q, k)  # share kernels

    text = jax.jit(layers).trace(q, k).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == kernels


def test_leads_from_the_measured_length_of_a_rule(monkeypatch) -> None:
    monkeypatch.setattr(backend_of_mosaic, "LEADS_FROM", {"exact": 300})
    for selection, T, leads in (("exact", 300, True), ("exact", 299, False), ("best_key", 300, False)):
        x = jax.ShapeDtypeStruct((1, T, 2, 64), jnp.bfloat16)
        problem = backend.Problem("gpu", (x, x), {"chunk_size": 64, "selection": selection}, is_named=False)
        assert backend_of_mosaic.BACKEND.leads(problem) is leads


def test_the_polynomial_approximates_powers_of_two() -> None:
    x = jnp.linspace(-60, 60, 10_001, dtype=jnp.float32)
    got = np.asarray(masses.polynomial_exp2(x), np.float64)  # not under jit: XLA would cancel the rounding
    assert np.abs(got / np.exp2(np.asarray(x, np.float64)) - 1).max() < 1e-4


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": "float32"}, "operands are float32"),
        ({"K": 96}, "head dim 96"),
        ({"C": 100}, "chunks of 100"),
        ({"selection": "approx"}, "selects by exact or best_key, not approx"),
        ({"platform": "tpu"}, "need an NVIDIA GPU, this is a tpu"),
        ({"is_named": False}, "only when selected by name"),
        ({"platform": "gpu", "capability": 80}, "compute capability 8.0, the kernel needs Hopper's, 9.0"),
        ({"platform": "gpu", "capability": 100}, "compute capability 10.0"),
        ({"platform": "gpu", "capability": None}, "no compute capability"),
        ({"platform": "gpu", "capability": 90}, None),
    ],
    ids=str,
)
def test_refusals_name_the_reason(change, match, monkeypatch) -> None:
    problem = {
        "dtype": "bfloat16",
        "K": 64,
        "C": 128,
        "selection": "exact",
        "platform": "cpu",
        "is_named": True,
    } | change
    if "capability" in problem:
        monkeypatch.setattr(device, "compute_capability", lambda: problem["capability"])
    elif problem["platform"] == "cpu" and not problem["is_named"] and refusal is not None:
        pytest.skip(refusal)
    x = jax.ShapeDtypeStruct((1, 512, 2, problem["K"]), jnp.dtype(problem["dtype"]))
    options = {"chunk_size": problem["C"], "selection": problem["selection"]}
    reason = backend_of_mosaic.refusal(backend.Problem(problem["platform"], (x, x), options, problem["is_named"]))
    assert reason is None if match is None else match in reason


def test_64_bit_mode_is_refused(monkeypatch) -> None:
    """Triton is chosen then: Pallas raises a TypeError, because its indices are int32 and int64."""
    monkeypatch.setattr(device, "compute_capability", lambda: 90)
    assert mosaic_gpu.refusal("gpu") is None
    with jax.enable_x64(True):
        assert "jax_enable_x64" in str(mosaic_gpu.refusal("gpu"))
