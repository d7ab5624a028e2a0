"""Residuals of the backward passes.

The tests cover rematerialisation, memory against length, and the refusal of second derivatives.
"""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import xla_tiles
from kernels_pallas.top1_chunk import reference
from tests import support
from tests.kernels.common import (
    KERNELS,
    NAMES,
    OPS,
    Shape,
    count_primitive,
    fast_jit,
    qkv,
    temporary_bytes,
    with_grads,
)


@pytest.mark.parametrize(
    ("name", "saved"),
    support.slow_unless(
        lambda name, _: name == "exact-masked",
        [*((name, NAMES) for name in OPS), ("exact-sorted", NAMES[:1])],
    ),
)
def test_saved_selection_is_reused_with_equal_gradients(small_tiles, name, saved) -> None:
    op, (q, k, v) = OPS[name], qkv(Shape(T=40))
    policy = jax.checkpoint_policies.save_only_these_names(*saved)
    layers = {
        "plain": op,
        "full remat": jax.checkpoint(op),
        "saved": jax.checkpoint(op, policy=policy),
    }
    selections = {
        name: count_primitive(jax.make_jaxpr(with_grads(layer))(q, k, v).jaxpr, "argmax")
        for name, layer in layers.items()
    }
    assert selections["plain"] == 1
    assert selections["full remat"] == 2
    assert selections["saved"] == 1
    want = fast_jit(with_grads(layers["plain"]))(q, k, v)
    got = fast_jit(with_grads(layers["saved"]))(q, k, v)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_rematerialised_give_the_same_bits(name) -> None:
    """With residuals saved by name, only the backward kernels run again.

    Otherwise forward kernels run twice.
    """
    op, (q, k, v) = KERNELS[name], qkv(Shape(T=30, B=1, G=1))
    policy = jax.checkpoint_policies.save_only_these_names(*NAMES)
    layers = (op, jax.checkpoint(op, policy=policy), jax.checkpoint(op))
    calls = [count_primitive(jax.make_jaxpr(with_grads(layer))(q, k, v).jaxpr, "custom_vmap_call") for layer in layers]
    assert calls[0] == calls[1] < calls[2]
    want, *others = (fast_jit(with_grads(layer))(q, k, v) for layer in layers)
    for got in others:
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_saving_all_names_leaves_only_the_backward_pass(small_tiles) -> None:
    q, k, v = qkv(Shape(T=40))
    policy = jax.checkpoint_policies.save_only_these_names(*NAMES)
    for op in (OPS["exact-masked"], OPS["element"]):
        plain, saved = (
            count_primitive(jax.make_jaxpr(with_grads(layer))(q, k, v).jaxpr, "dot_general")
            for layer in (op, jax.checkpoint(op, policy=policy))
        )
        assert saved == plain


@pytest.mark.parametrize("name", ["exact-masked", pytest.param("approx-sorted", marks=pytest.mark.slow), "element"])
def test_memory_grows_linearly_with_length(name, monkeypatch) -> None:
    monkeypatch.setattr(xla_tiles, "TILE_ELEMENTS", {})
    monkeypatch.setattr(xla_tiles, "TILE_ELEMENTS_DEFAULT", 2**14)  # tiles of scores are small compared with q, k, v

    def growth(op) -> list[float]:
        sizes = [
            temporary_bytes(with_grads(op), *[jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)] * 3)
            for T in (1024, 2048, 4096)
        ]
        return [b / a for a, b in pairwise(sizes)]

    assert max(growth(OPS[name])) < 2.2
    if name == "exact-masked":  # check the measurement: the dense form is quadratic
        assert min(growth(partial(reference.top1_chunk_attention, chunk_size=8))) > 3.5


def test_second_derivatives_are_refused() -> None:
    q, k, v = qkv(Shape(T=10))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(OPS["exact-masked"], (q, k, v), (q, k, v))
