"""Inputs and comparisons for the kernel tests."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np

import kernels_pallas as kp
from kernels_pallas.select_chunk import xla as select_xla
from kernels_pallas.select_chunk.tables import Shortlist
from kernels_pallas.top1_chunk import api as chunk_api
from kernels_pallas.top1_chunk.xla import attention as xla_attention
from seqjax.nn.params import Template

# Allowed error relative to the output's scale: one rounding of the output and of the product inputs.
TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "float16": 6e-3, "bfloat16": 4e-2}

SCHEDULES = {"masked": xla_attention.MASKED, "sorted": xla_attention.SORTED}


def chunk_attention(
    q,
    k,
    v,
    *,
    how: str,
    chunk_size: int = 8,
    selection: str = "exact",
    top_k: int = 1,
    shortlist: int = 4,
    table: str = "mean",
    scale: float | None = None,
):
    """Run Top-1 Chunk with an xla schedule or the Triton kernels, as in `how`."""
    if how == "triton":
        options = {"chunk_size": chunk_size, "selection": selection, "top_k": top_k, "scale": scale}
        options |= {"shortlist": shortlist, "table": table}
        return kp.top1_chunk_attention(q, k, v, implementation="triton", **options)
    listed = Shortlist(shortlist, table) if selection == "shortlist" else None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    call = chunk_api.Call(select_xla, SCHEDULES[how], chunk_size, selection, scale, top_k, listed)
    return chunk_api.attend(q, k, v, call)


OPS = {
    "exact-masked": partial(chunk_attention, how="masked"),
    "exact-sorted": partial(chunk_attention, how="sorted"),
    "approx-sorted": partial(chunk_attention, how="sorted", selection="approx"),
    "element": kp.top1_element_attention,
    "element-soft": partial(kp.top1_element_attention, v_grad="soft"),
}
# Run in the interpreter or on a GPU (conftest.py).
KERNELS = {
    "element-triton": partial(kp.top1_element_attention, implementation="triton"),
    "exact-triton": partial(kp.top1_chunk_attention, chunk_size=8, implementation="triton"),
    "approx-triton": partial(kp.top1_chunk_attention, chunk_size=8, selection="approx", implementation="triton"),
    "approx-several-triton": partial(
        kp.top1_chunk_attention, chunk_size=8, selection="approx", top_k=2, implementation="triton"
    ),
    "shortlist-triton": partial(
        kp.top1_chunk_attention, chunk_size=4, selection="shortlist", shortlist=2, implementation="triton"
    ),
}
# All implementations of Top-1 Chunk.
HOW = (*SCHEDULES, "triton")
NAMES = ("top1_selection", "attention_out", "attention_lse")

ON_GPU = os.environ.get("SEQJAX_TEST_GPU") == "1"

# Settings for property tests. The interpreter takes seconds per example, so it gets fewer examples and no shrinking.
settings = hypothesis.settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
unshrunk = hypothesis.settings(settings, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])

# LLVM dominates a sweep's time. Tests for bits, memory and devices compile with default options.
fast_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def selector(how: str) -> str:
    """Return the `select_chunk` implementation for `how`."""
    return "triton" if how == "triton" else "xla"


class Shape(NamedTuple):
    B: int = 2
    T: int = 50
    R: int = 2
    G: int = 2
    K: int = 8
    V: int = 6
    C: int = 16

    @property
    def heads(self) -> int:
        return self.R * self.G


def qkv(shape: Shape, *, seed: int = 0, dtype: str = "float32", gain: float = 1.0) -> tuple[jax.Array, ...]:
    """Draw random q, k and v; `gain` multiplies q and so the spread of the scores."""
    rng = np.random.default_rng(seed)
    sizes = [(shape.heads, shape.K), (shape.G, shape.K), (shape.G, shape.V)]
    q, k, v = (rng.normal(size=(shape.B, shape.T, *size)) for size in sizes)
    return tuple(jnp.asarray(x, dtype) for x in (gain * q, k, v))


def cotangent(o, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=o.shape), o.dtype)


def assert_close(got, want, dtype: str, what: str = "", scale: float = 1.0) -> None:
    """Compare arrays within the rounding of `dtype`.

    The scale is the larger of `scale` and the largest entry in `want`.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.isfinite(got).all(), what
    scale = max(scale, np.abs(want).max(initial=0))
    worst = np.abs(got - want).max(initial=0)
    assert worst <= TOLERANCE[dtype] * scale, f"{what}: off by {worst:.2e} at scale {scale:.2e}"


def assert_selection(sel_BTH: np.ndarray, score_BTHc: np.ndarray, chunk_size: int, tolerance: float = 1e-4) -> None:
    """Check a selection against scores, up to rounding.

    A clear best chunk must be selected; near ties may select any of the best. The first chunk selects -1.
    """
    assert sel_BTH.dtype == np.int32
    assert (sel_BTH[:, :chunk_size] == -1).all()
    sel, score = sel_BTH[:, chunk_size:], score_BTHc[:, chunk_size:]
    if not sel.size:
        return
    assert (sel >= 0).all()
    chosen = np.take_along_axis(score, sel[..., None], -1)[..., 0]
    assert np.isfinite(chosen).all(), "a chunk that is not past was selected"
    best, slack = score.max(-1), tolerance * np.maximum(1, np.abs(score.max(-1)))
    is_clear = (score >= (best - slack)[..., None]).sum(-1) == 1
    np.testing.assert_array_equal(sel[is_clear], score.argmax(-1)[is_clear])
    assert (best - chosen <= slack).all()


def value_and_grads(f, *args) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return f(*args) and its gradients from one jit, for a fixed random cotangent."""
    do = cotangent(jax.eval_shape(f, *args))

    @fast_jit
    def run(do, *args):
        o, pull = jax.vjp(f, *args)
        return o, pull(do.astype(o.dtype))

    return run(do, *args)


def loss_of(op):
    return lambda q, k, v: (op(q, k, v).astype(jnp.float32) ** 2).sum()


def with_grads(op):
    return jax.value_and_grad(loss_of(op), argnums=(0, 1, 2))


def outputs_and_gradients(f: Any, arrays: Any, wide: bool = False, *, like: Any, names: Sequence[str]) -> Any:
    """Return f(*arrays) and its gradients by name, for fixed random cotangents.

    Cotangents are rounded to the result dtypes of `like`. With `wide`, compute in float64.
    """
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(like, *arrays)
    cotangents = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)
    with jax.enable_x64(wide):
        if wide:
            arrays, cotangents = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (tuple(arrays), cotangents))

        @fast_jit
        def run(arrays, cotangents):
            out, pull = jax.vjp(f, *arrays)
            return out, dict(zip(names, pull(cotangents), strict=True))

        return jax.tree.map(np.asarray, run(tuple(arrays), cotangents))


def assert_each_close(got: Any, want: Any, dtype: str = "float32", slack: float = 1.0, *, of_ones: str) -> None:
    """Compare trees within `slack` times the tolerance, at each array's scale.

    The gradient named `of_ones` is a difference between sums of terms near 1. With strong decays only rounding remains,
    so its scale is at least 1.
    """
    leaves, wanted = (jax.tree_util.tree_leaves_with_path(tree) for tree in (got, want))
    for (path, g), (_, w) in zip(leaves, wanted, strict=True):
        name = jax.tree_util.keystr(path)
        assert_close(g, w, dtype, name, scale=slack * max(np.abs(w).max(), 1.0 if of_ones in name else 1e-3))


def assert_trees_close(got, want, atol: float = 2e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=atol), got, want)


def count_primitive(jaxpr, name: str) -> int:
    """Count a primitive in a jaxpr and its nested jaxprs."""
    total = 0
    for eqn in jaxpr.eqns:
        total += eqn.primitive.name == name
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += count_primitive(inner, name)
    return total


def temporary_bytes(f, *shapes: jax.ShapeDtypeStruct) -> int:
    return jax.jit(f).lower(*shapes).compile().memory_analysis().temp_size_in_bytes


def mixer_gradients(make: Callable[..., Any]) -> Callable[[], Any]:
    """Return a function that computes a mixer's value and gradients.

    It uses the current backends. The mixer has width 16, and no parameter is 0, unlike in a newly initialised model.
    """
    template = Template(lambda rngs, _: make(16, rngs=rngs))
    wave = lambda p: 0.1 * jnp.cos(jnp.arange(p.size, dtype=p.dtype)).reshape(p.shape)  # noqa: E731
    params = jax.tree.map(lambda p: p + wave(p), template.init(jax.random.key(0)))
    x_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(2, 11, 16)), jnp.float32)

    def gradients() -> Any:
        loss = lambda params, x_BTD: jnp.sum(jnp.sin(template.bind(params)(x_BTD)))  # noqa: E731
        return fast_jit(jax.value_and_grad(loss, (0, 1)))(params, x_BTD)

    return gradients
