"""Softmax attention over packed documents, against separate documents in float64.

The tests also change one document and compare the bits of the other documents.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kernels_pallas as kp
from kernels_pallas import xla_tiles
from kernels_pallas.attention import chunked, documents, reference, xla
from kernels_pallas.attention.splash import kernel as splash
from seqjax.sharding import heads_split, make_mesh
from tests import extras, support
from tests.kernels.common import ON_GPU, fast_jit
from tests.kernels.test_chunked_attention import (
    SLOPES,
    TOLERANCE,
    by_hand,
    log_gates,
    operands,
    output_and_gradients,
)

# First tokens of documents, by batch entry. Tiles have 16 positions: cuts within tiles and at an edge, several in one
# tile, documents of one token.
CUTS = ((5, 16, 17, 18, 40), (33,))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(chunked, "UNIT", 8)
    monkeypatch.setattr(xla_tiles, "TILE_ELEMENTS", {"cpu": 2**11})


def packed(n_tokens: int, cuts: tuple[tuple[int, ...], ...] = CUTS) -> jax.Array:
    """Return segments [B, T] whose documents begin at 0 and at the cuts."""
    begins = np.zeros((len(cuts), n_tokens), np.int32)
    for row, row_cuts in zip(begins, cuts, strict=True):
        row[[cut for cut in row_cuts if cut < n_tokens]] = 1
    return jnp.asarray(begins.cumsum(1), jnp.int32)


def backend_of(name: str) -> Any:
    if name == "triton":
        return extras.triton_module("attention.triton.gated").attend
    return {"chunked": chunked.attend, "xla": xla.attend, "reference": reference.causal_attention}[name]


def one_by_one(segments_BT: jax.Array, *inputs: jax.Array, **options: Any) -> tuple[np.ndarray, ...]:
    """Return `by_hand` of every document by itself."""
    results: list[np.ndarray] = []
    for b, row in enumerate(np.asarray(segments_BT)):
        for document in np.unique(row):
            (at,) = np.nonzero(row == document)
            parts = by_hand(*(x[b : b + 1, at] for x in inputs), **options)
            results = results or [np.zeros((*segments_BT.shape, *part.shape[2:])) for part in parts]
            for whole, part in zip(results, parts, strict=True):
                whole[b, at] = part[0]
    return tuple(results)


QUICK = {("reference", 50), ("xla", 50), ("chunked", 49), ("chunked", 50), ("triton", 50)}


@pytest.mark.parametrize(
    ("backend", "n_tokens", "window", "slopes", "n_kv", "gates", "dtype"),
    support.slow_unless(
        lambda backend, n_tokens, window, slopes, n_kv, gates, dtype: (backend, n_tokens) in QUICK,
        [
            ("reference", 50, 7, SLOPES, 2, True, "float32"),
            ("xla", 50, 7, SLOPES, 2, True, "float32"),
            ("xla", 49, 0, (), 4, False, "bfloat16"),
            ("chunked", 50, 0, (), 4, False, "float32"),
            ("chunked", 49, 7, SLOPES, 2, True, "float32"),
            ("chunked", 48, 0, (), 1, True, "bfloat16"),
            ("chunked", 1, 0, (), 4, True, "float32"),
            ("triton", 50, 0, (), 2, False, "float32"),
            ("triton", 64, 0, (), 4, False, "bfloat16"),
            ("triton", 65, 0, (), 1, True, "float32"),
            ("triton", 50, 7, (), 2, False, "float16"),
            ("triton", 51, 20, SLOPES, 2, False, "float32"),
            ("triton", 50, 7, SLOPES, 2, True, "float32"),
            ("triton", 1, 3, (), 4, False, "float32"),
        ],
    ),
)
def test_values_and_gradients_equal_separate_documents(backend, n_tokens, window, slopes, n_kv, gates, dtype):
    inputs = (*operands(n_tokens, n_kv, dtype), *[log_gates(n_tokens)] * gates)
    options: Any = {"window": window, "scale": 0.7, "slopes": slopes}
    segments = packed(n_tokens)
    run = partial(output_and_gradients, attend=backend_of(backend), segments_BT=segments, **options)
    got = fast_jit(run)(*inputs)
    want = one_by_one(segments, *inputs, **options)
    for x, like, y in zip(got, (inputs[3], *inputs[:3], *inputs[4:]), want, strict=True):
        assert (x.shape, x.dtype) == (like.shape, like.dtype)
        scale = max(1.0, np.abs(y).max())
        np.testing.assert_allclose(x.astype(jnp.float32), y, atol=TOLERANCE[dtype] * scale, rtol=0)


@pytest.mark.parametrize(
    ("backend", "n_gates"),
    support.slow_unless(
        lambda backend, n_gates: (backend, n_gates) in (("chunked", 1), ("xla", 1), ("triton", 1)),
        [("chunked", 0), ("chunked", 1), ("xla", 0), ("xla", 1), ("triton", 0), ("triton", 1)],
    ),
)
def test_a_document_depends_on_no_other_document(backend, n_gates):
    """Changing document 1 changes no bit of documents 2 and 3.

    A loss on document 2 has no gradient in other documents, and its gradients keep their bits too.
    """
    n_tokens, cuts = 50, (21, 37)
    inputs = (*operands(n_tokens, 2), *[log_gates(n_tokens)] * n_gates)
    run = fast_jit(
        partial(
            output_and_gradients,
            attend=partial(kp.causal_attention, implementation=backend, segments=packed(n_tokens, (cuts, cuts))),
            scale=0.7,
        )
    )
    changed = [x.at[:, : cuts[0]].multiply(-1.7) for x in inputs]
    for x, y in zip(run(*inputs), run(*changed), strict=True):
        np.testing.assert_array_equal(x[:, cuts[0] :], y[:, cuts[0] :])
        assert not (x[:, : cuts[0]] == y[:, : cuts[0]]).all()
    inside = (jnp.arange(n_tokens) >= cuts[0]) & (jnp.arange(n_tokens) < cuts[1])
    only = lambda inputs: (*inputs[:3], jnp.where(inside[:, None, None], inputs[3], 0), *inputs[4:])  # noqa: E731
    for x, y, every in zip(run(*only(inputs))[1:], run(*only(changed))[1:], run(*inputs)[1:], strict=True):
        assert not x[:, ~np.asarray(inside)].any()
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(x[:, cuts[0] : cuts[1]], every[:, cuts[0] : cuts[1]])


def test_the_gate_of_a_first_token_has_no_effect():
    """It is between two documents."""
    segments, inputs = packed(50), (*operands(50), log_gates(50))
    run = fast_jit(partial(output_and_gradients, attend=partial(kp.causal_attention, segments=segments)))
    is_first = np.diff(np.asarray(segments), axis=1, prepend=0) > 0
    got, changed = run(*inputs), run(*inputs[:4], jnp.where(is_first[..., None], -1000, inputs[4]))
    for x, y in zip(got, changed, strict=True):
        np.testing.assert_array_equal(x, y)
    assert not got[-1][is_first].any()


@pytest.mark.parametrize("window", [0, 1, 7, 100])
def test_bounds_of_a_query_and_of_a_key(window):
    rng = np.random.default_rng(0)
    segments = jnp.asarray((rng.random((3, 40)) < 0.2).cumsum(1), jnp.int32)
    i, j = np.arange(40)[:, None], np.arange(40)
    is_read = (np.asarray(segments)[:, :, None] == np.asarray(segments)[:, None]) & (j <= i)
    is_read &= i - j < (window or 40)
    first, end = documents.first_keys(segments, window), documents.end_of_queries(segments, window)
    np.testing.assert_array_equal(first, is_read.argmax(2))
    np.testing.assert_array_equal(jnp.minimum(end, 40), 40 - is_read[:, ::-1].argmax(1))


def test_gate_sums_stay_accurate_and_near_across_documents():
    """The sum falls by 8,000 in document 1, without a jump at the boundary.

    The sums' differences within document 2 do not depend on document 1, in any bit.
    """
    gated = extras.triton_module("attention.triton.gated")
    log_f = jax.nn.log_sigmoid(2 * jax.random.normal(jax.random.key(0), (1, 10_000, 2)))
    segments = packed(10_000, ((9_000,),))
    run = jax.jit(gated.running_sums)
    whole, rest = (np.asarray(x, np.float64) for x in run(log_f, segments))
    assert np.abs(rest).max() <= 0.5 and (whole == np.round(whole)).all() and whole.min() < -8_000
    differences = np.diff(whole) + np.diff(rest)
    want = np.moveaxis(np.asarray(log_f, np.float64), 1, 2)[..., 1:]
    inside = np.arange(1, 10_000) != 9_000
    np.testing.assert_allclose(differences[..., inside], want[..., inside], atol=3e-7, rtol=0)
    assert np.abs(differences - want).max() <= 1
    other_whole, other_rest = run(log_f.at[:, :9_000].multiply(0.3), segments)
    np.testing.assert_array_equal(np.diff(other_whole[..., 9_000:]), np.diff(whole[..., 9_000:]))
    np.testing.assert_array_equal(other_rest[..., 9_000:], rest[..., 9_000:])


@pytest.mark.slow
def test_batch_and_heads_are_sharded_without_collectives():
    inputs = (*operands(50, n_kv=2, n_batch=4), jnp.concatenate([log_gates(50)] * 2))
    segments = packed(50, CUTS * 2)
    options: Any = {"window": 0, "scale": 1.0, "slopes": ()}

    def run(segments, *inputs):
        return output_and_gradients(*inputs, segments_BT=segments, **options)

    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    split, rows = (NamedSharding(mesh, P(("data", "fsdp"), *dims)) for dims in ((None, "tensor"), ()))
    program = jax.jit(run, in_shardings=(rows, *[split] * 5), out_shardings=split).lower(segments, *inputs).compile()
    text = str(program.as_text())
    assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    got = program(jax.device_put(segments, rows), *(jax.device_put(x, split) for x in inputs))
    for x, want in zip(got, one_by_one(segments, *inputs, **options), strict=True):
        np.testing.assert_allclose(x, want, atol=2e-5 * max(1.0, np.abs(want).max()), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["chunked", "triton"])
def test_batches_under_vmap(backend):
    inputs = (*operands(20, n_batch=4), jnp.concatenate([log_gates(20)] * 2))
    segments, options = packed(20, CUTS * 2), {"window": 0, "scale": 0.7, "slopes": ()}
    run = lambda segments, *x: output_and_gradients(  # noqa: E731
        *x, attend=backend_of(backend), segments_BT=segments, **options
    )
    split = [x.reshape(2, 2, *x.shape[1:]) for x in (segments, *inputs)]
    for x, y in zip(fast_jit(jax.vmap(run))(*split), fast_jit(run)(segments, *inputs), strict=True):
        np.testing.assert_allclose(x.reshape(y.shape), y, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_splash_attention_in_the_interpreter(devices, monkeypatch):
    """On a mesh, each device gets the segments of its sequences."""
    monkeypatch.setattr(splash, "BLOCK", 128)
    rng = np.random.default_rng(0)
    inputs = [jnp.asarray(rng.standard_normal((4, 200, n, 64)), jnp.float32) for n in (4, 2, 2, 4)]
    segments, options = packed(200, ((50, 128), (30,), (), (1, 199))), {"window": 60, "scale": 0.2, "slopes": ()}
    run = lambda attend, *x: output_and_gradients(*x, attend=attend, segments_BT=segments, **options)  # noqa: E731
    want = fast_jit(partial(run, reference.causal_attention))(*inputs)
    with jax.set_mesh(make_mesh(data=devices, devices=jax.devices()[:devices])):
        attend = partial(splash.attend, interpret=True, split=heads_split(4, 2) if devices > 1 else None)
        got = jax.jit(partial(run, attend))(*inputs)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=3e-5)


@pytest.mark.skipif(ON_GPU, reason="a CPU is wanted: what refuses there")
def test_refusals_without_a_gpu():
    q, k, v, _ = operands(20)
    with pytest.raises(kp.BackendError, match="segments"):
        kp.causal_attention(q, k, v, implementation="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("T", "dim", "n_kv", "window", "gates"),
    [(1024, 64, 4, 0, False), (127, 64, 2, 0, True), (1000, 96, 4, 300, False), (513, 128, 1, 0, False)],
)
def test_at_real_sizes(T, dim, n_kv, window, gates, dtype):
    rng = np.random.default_rng(0)
    q, do = (jnp.asarray(rng.standard_normal((2, T, 4, dim)), dtype) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((2, T, n_kv, dim)), dtype) for _ in range(2))
    segments = packed(T, ((50, 64, 120), (100,)))
    options: Any = {"window": window, "scale": dim**-0.5, "slopes": ()}
    run = lambda attend, *x: output_and_gradients(*x, attend=attend, segments_BT=segments, **options)  # noqa: E731
    inputs = (q, k, v, do, *[log_gates(T)] * gates)
    got = jax.jit(partial(run, backend_of("triton")))(*inputs)
    with jax.enable_x64(True):
        wide = (jnp.asarray(x, jnp.float64) for x in inputs)
        want = jax.jit(partial(run, reference.causal_attention))(*wide)
    for x, y in zip(got, want, strict=True):
        scale = max(1.0, float(np.abs(y).max()))
        np.testing.assert_allclose(x.astype(jnp.float32), y, atol=TOLERANCE[dtype] * scale, rtol=0)
