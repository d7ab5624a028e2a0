"""Selection by the best key in 8 bits: all backends match bit for bit."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kp
from kernels_pallas import BackendError
from kernels_pallas.select_chunk import int8
from kernels_pallas.select_chunk import reference as select_reference
from kernels_pallas.top1_chunk import reference
from tests import support
from tests.kernels.common import Shape, assert_close, fast_jit, qkv
from tests.kernels.test_decode import decode_all

RULE = "best_key_int8"
# Chunk sizes that divide a key tile, do not divide it, and exceed the sequence; grouped heads; head dims below 32
# (padded) and not powers of two.
SHAPES = [Shape(T=61, C=8), Shape(B=1, T=70, K=40, C=7, G=1), Shape(B=1, T=130, K=64, C=32), Shape(T=9, C=16)]


def drawn(shape: Shape, dtype: str = "float32") -> tuple[jax.Array, ...]:
    """Draw q, k and v; keys, and so the quantisation steps of chunks, differ in size."""
    q, k, v = qkv(shape, dtype=dtype)
    size = np.exp(2 * np.random.default_rng(2).normal(size=(shape.B, shape.T, shape.G, 1)))
    return q, (k * size).astype(dtype), v


def plain(q, k, C: int, sign: float) -> np.ndarray:
    q, k = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k))
    (B, T, H, _), R = q.shape, q.shape[2] // k.shape[2]
    sel = np.full((B, T, H), -1)
    q = sign * np.round(q * 127 / abs(q).max(-1, keepdims=True))
    for b, h in np.ndindex(B, H):
        scores = []
        for c in range(T // C):
            k_CK = k[b, c * C : (c + 1) * C, h // R]
            step = 2.0 ** np.ceil(np.log2(abs(k_CK).max() / 127))
            scores.append((q[b, :, h] @ (step * np.round(k_CK / step)).T).max(-1))
        for t in range(C, T):
            sel[b, t, h] = np.argmax([score[t] for score in scores[: t // C]])
    return sel


@pytest.mark.parametrize(
    ("shape", "dtype", "scale"),
    support.slow_unless(
        lambda shape, dtype, scale: (dtype == "float32") == (scale is None),
        itertools.product(SHAPES, ["float32", "bfloat16"], [None, -0.5]),
    ),
    ids=str,
)
def test_equals_the_definition(implementation, shape, dtype, scale) -> None:
    q, k, _ = drawn(shape, dtype)
    want = plain(q, k, shape.C, np.sign(scale or 1))
    options = {"chunk_size": shape.C, "selection": RULE, "scale": scale}
    for select in (partial(kp.select_chunk, implementation=implementation), select_reference.select_chunk):
        np.testing.assert_array_equal(fast_jit(partial(select, **options))(q, k), want)


def test_equal_keys_and_zeros_go_to_the_smallest_chunk(implementation) -> None:
    shape = Shape(T=40, C=8)
    q, k, _ = drawn(shape)
    for keys in (jnp.tile(k[:, :8], (1, 5, 1, 1)), jnp.zeros_like(k)):
        sel = kp.select_chunk(q, keys, chunk_size=8, selection=RULE, implementation=implementation)
        assert (np.asarray(sel)[:, 8:] == 0).all()


def test_a_step_is_the_smallest_power_of_two() -> None:
    largest = np.asarray([127, 127.5, 128, 254, 1e-3, 63.5, 0], np.float32)
    k = np.zeros((1, 7 * 4, 1, 3), np.float32)
    k[0, 1::4, 0, 2] = -largest
    k8, step = int8.quantize_keys(jnp.asarray(k), 4)
    np.testing.assert_array_equal(step[0, :, 0], [1, 2, 2, 2, 2.0**-16, 0.5, 1])
    np.testing.assert_array_equal(k8[0, 1::4, 0, 2], [-127, -64, -64, -127, -66, -127, 0])


def test_later_keys_change_nothing() -> None:
    """Change keys to 1,000 in the last two chunks."""
    shape = Shape(T=61, C=8)
    q, k, _ = drawn(shape)
    select = partial(kp.select_chunk, chunk_size=8, selection=RULE)
    later = select(q, k.at[:, 41:].set(1000.0))
    np.testing.assert_array_equal(later[:, :48], select(q, k)[:, :48])
    assert (np.asarray(later)[:, 48:] == 5).any()


@pytest.mark.slow
def test_equals_best_key_except_for_near_ties() -> None:
    """The best of 40 chunks is always among the four best in 8 bits.

    The keys are normal.
    """
    shape = Shape(B=1, T=41 * 32, R=1, K=64, C=32)
    q, k, _ = qkv(shape)
    options = {"chunk_size": 32, "implementation": "xla"}
    best, first = (np.asarray(kp.select_chunk(q, k, selection=rule, **options))[:, 64:] for rule in ("best_key", RULE))
    assert 0.93 < (best == first).mean() < 1
    four = np.asarray(kp.select_chunk(q, k, selection=RULE, top_k=4, **options))[:, 64:]
    assert (four == best[..., None]).any(-1).all()


@pytest.mark.parametrize("top_k", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_decoding_equals_the_parallel_form(top_k) -> None:
    shape = Shape(T=37, C=8)
    q, k, v = drawn(shape)
    options = {"chunk_size": 8, "selection": RULE, "top_k": top_k}
    want = jax.jit(partial(kp.top1_chunk_attention, **options))(q, k, v)
    assert_close(decode_all(q, k, v, max_len=40, with_table=False, **options), want, "float32")


def test_gradients_use_unrounded_keys() -> None:
    """Rounding only affects the selection.

    Attention and its gradient read exact keys.
    """
    q, k, v = drawn(SHAPES[0])
    sel = kp.select_chunk(q, k, chunk_size=8, selection=RULE)

    def gradients(f):
        return fast_jit(jax.value_and_grad(lambda q, k, v: (f(q, k, v) ** 2).sum(), (0, 1, 2)))(q, k, v)

    got = gradients(partial(kp.top1_chunk_attention, chunk_size=8, selection=RULE))
    want = gradients(lambda q, k, v: reference.attend(q, k, v, sel, chunk_size=8))
    jax.tree.map(lambda a, b: assert_close(a, b, "float32"), got, want)


def test_the_triton_backend_refuses_to_decode() -> None:
    q, k, v = drawn(SHAPES[0])
    with pytest.raises(BackendError, match=r"best_key_int8.*implementation='xla'"):
        kp.top1_chunk_decode(q[:, -1], k, v, 61, chunk_size=8, selection=RULE, implementation="triton")
