"""Chunked cross-entropy against a dense float64 version; the logits of the replicated batch are never in memory."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import kernels_pallas
from kernels_pallas.cross_entropy import xla
from kernels_pallas.triton import interpreter, runtime
from seqjax.ops.cross_entropy import cross_entropy, sequence_losses, token_losses
from seqjax.sharding import make_mesh
from tests import extras

B, T, D, O = 3, 11, 8, 29  # T = 11 is prime: only chunks of 1 and 11 divide it


def problem(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    h = jnp.asarray(2 * rng.standard_normal((B, T, D)), dtype)
    w = jnp.asarray(rng.standard_normal((D, O)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, O, (B, T)), jnp.int32)
    weights = jnp.asarray(rng.random((B, T)) * (rng.random((B, T)) < 0.7), jnp.float32)
    return h, w, targets, weights


def dense(h, w, targets, weights):
    """Return the loss, dL/dh and dL/dw in float64."""
    h, w, weights = (np.asarray(x, np.float64) for x in (h, w, weights))
    logits = h @ w
    top = logits.max(-1, keepdims=True)
    p = np.exp(logits - top)
    lse = np.log(p.sum(-1)) + top[..., 0]
    hit = np.eye(O)[np.asarray(targets)]
    loss = (weights * (lse - (logits * hit).sum(-1))).sum()
    g = (p / p.sum(-1, keepdims=True) - hit) * weights[..., None]
    return loss, g @ w.T, np.einsum("btd,bto->do", h, g)


@pytest.mark.parametrize("chunk", [1, 2, 3, 9, 12, 33, 4096])
def test_value_and_gradients(chunk):
    """Chunk sizes below the batch size, not dividing T, equal to the batch, and larger."""
    h, w, targets, weights = problem()
    want = dense(h, w, targets, weights)
    function = jax.jit(jax.value_and_grad(lambda h, w: cross_entropy(h, w, targets, weights, chunk), argnums=(0, 1)))
    loss, (dh, dw) = function(h, w)
    np.testing.assert_allclose(loss, want[0], rtol=1e-5)
    np.testing.assert_allclose(dh, want[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dw, want[2], rtol=1e-4, atol=1e-5)
    assert (np.asarray(dh)[np.asarray(weights) == 0] == 0).all()
    # Without a gradient, another branch runs.
    np.testing.assert_allclose(cross_entropy(h, w, targets, weights, chunk), loss, rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 9, 33, 4096])
def test_token_losses_sum_to_sequence_losses(chunk):
    """Each token's loss matches float64 at every chunk size."""
    h, w, targets, _ = problem()
    got = jax.jit(token_losses, static_argnums=3)(h, w, targets, chunk)
    logits = np.asarray(h, np.float64) @ np.asarray(w, np.float64)
    hit = np.take_along_axis(logits, np.asarray(targets)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(got, np.log(np.exp(logits).sum(-1)) - hit, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.sum(got, 1), sequence_losses(h, w, targets, chunk), rtol=1e-6)


def test_bfloat16_with_tied_embeddings():
    """One chunk holds all tokens and the gradient is transposed; XLA on a CPU refuses this product in bfloat16."""
    h, w, targets, weights = problem(jnp.bfloat16)
    table = w.T.astype(jnp.bfloat16)
    function = jax.jit(jax.grad(lambda h, t: cross_entropy(h, t.T, targets, weights, 4096), argnums=(0, 1)))
    dh, dtable = function(h, table.astype(jnp.float32))
    _, want_dh, want_dw = dense(h, table.T, targets, weights)
    scale = np.abs(want_dw).max()  # the logit gradient is rounded to bfloat16: half a unit of 2^-8
    np.testing.assert_allclose(dtable, want_dw.T, atol=scale * 2**-8)
    np.testing.assert_allclose(dh.astype(np.float32), want_dh, atol=np.abs(want_dh).max() * 2**-6)


def test_the_cotangent_scales_the_gradient():
    h, w, targets, weights = problem()
    plain = jax.grad(lambda h: cross_entropy(h, w, targets, weights, 9))(h)
    scaled = jax.grad(lambda h: -3 * cross_entropy(h, w, targets, weights, 9))(h)
    np.testing.assert_allclose(scaled, -3 * np.asarray(plain), rtol=1e-5)


def test_uniform_logits_give_the_log_of_the_vocabulary():
    _, w, targets, _ = problem()
    loss = cross_entropy(jnp.zeros((B, T, D)), w, targets, jnp.ones((B, T)), 9)
    assert float(loss) == pytest.approx(B * T * np.log(O), rel=1e-6)


def test_large_logits_do_not_overflow():
    h, w, targets, weights = problem()
    loss, (dh, dw) = jax.value_and_grad(lambda h, w: cross_entropy(h, w, targets, weights, 9), (0, 1))(1e3 * h, w)
    np.testing.assert_allclose(loss, dense(1e3 * h, w, targets, weights)[0], rtol=1e-5)
    assert np.isfinite(dh).all()
    assert np.isfinite(dw).all()


def test_bfloat16():
    h, w, targets, weights = problem(jnp.bfloat16)
    loss, (dh, dw) = jax.value_and_grad(lambda h, w: cross_entropy(h, w, targets, weights, 9), (0, 1))(h, w)
    want = dense(h, jnp.asarray(w, jnp.bfloat16), targets, weights)
    assert (loss.dtype, dh.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(loss, want[0], rtol=1e-4)
    np.testing.assert_allclose(np.asarray(dh, np.float64), want[1], atol=0.02 * np.abs(want[1]).max())
    np.testing.assert_allclose(dw, want[2], atol=0.02 * np.abs(want[2]).max())


@pytest.mark.parametrize("with_grad", [False, True])
def test_memory_is_bounded_by_the_chunk(with_grad):
    """The program's temporary memory is far below [B, T, O], and grows with the chunk."""
    batch, length, dim, vocab = 2, 2048, 16, 4096

    def temporaries(chunk):
        def loss(h, w):
            targets = jnp.zeros((batch, length), jnp.int32)
            return cross_entropy(h, w, targets, jnp.ones((batch, length)), chunk)

        function = jax.value_and_grad(loss, (0, 1)) if with_grad else loss
        shapes = (
            jax.ShapeDtypeStruct((batch, length, dim), jnp.float32),
            jax.ShapeDtypeStruct((dim, vocab), jnp.float32),
        )
        return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    all_logits = 4 * batch * length * vocab
    assert temporaries(128) < all_logits / 8
    assert temporaries(batch * length) > all_logits / 2, "the measure does not see logits at all"


@pytest.fixture
def launch_shapes(monkeypatch):
    """Replace the Triton launch with array code to test the partitioning; return the shapes per launch."""
    extras.need("triton")
    from kernels_pallas.cross_entropy.triton import loss

    seen = []

    def launch(*arrays, dtype):
        seen.append(arrays[0].shape)
        return xla.run(*arrays, dtype=dtype)

    monkeypatch.setattr(loss, "_run", launch)
    monkeypatch.setattr(interpreter, "is_chosen", lambda: False)
    monkeypatch.setattr(runtime, "refusal", lambda platform: None)
    return seen


MESHES = [{"data": 2}, {"data": 2, "fsdp": 2}, {"seq": 2}, {"data": 2, "seq": 2, "tensor": 2}]
eight_devices = pytest.mark.skipif(jax.device_count() != 8, reason="eight devices wanted (XLA_FLAGS was given)")


@eight_devices
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_devices_reduce_gradients_once(sizes):
    """Results equal the dense ones, and the loop over chunks has no collectives."""
    check_single_reduction(sizes, None)


@eight_devices
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_each_device_runs_the_kernel_on_its_tokens(launch_shapes, sizes):
    """A vocabulary of 29 tokens is replicated, also if `tensor` is 2."""
    pieces = check_single_reduction(sizes, "triton")
    rows, length = 12 * sizes.get("seq", 1), 22 // sizes.get("seq", 1)
    assert launch_shapes[-1] == (rows // pieces, min(length, 24 // rows), O)


@eight_devices
def test_triton_refuses_a_sharded_vocabulary(launch_shapes):
    """If the mesh sizes do not divide the vocabulary, it is replicated and Triton runs."""
    mesh = make_mesh(tensor=2, devices=jax.devices()[:2])
    h, w, targets, weights = problem()
    even = jnp.pad(w, ((0, 0), (0, 1)), constant_values=-1e9)
    with jax.set_mesh(mesh):
        function = jax.jit(cross_entropy, static_argnames=("chunk", "implementation"))
        with pytest.raises(kernels_pallas.BackendError, match=r"triton: .*vocabulary"):
            function(h, even, targets, weights, implementation="triton")
        np.testing.assert_allclose(
            function(h, w, targets, weights, implementation="triton"), dense(*problem())[0], rtol=1e-6
        )
    assert launch_shapes


def check_single_reduction(sizes, implementation):
    """Check the loss and one reduction of the gradients; return the number of pieces of 12 sequences of 22 tokens."""
    n_devices = math.prod(sizes.values())
    mesh = make_mesh(**sizes, devices=jax.devices()[:n_devices])
    pieces = n_devices // sizes.get("tensor", 1)
    h, w, targets, weights = problem()
    h, targets, weights = (jnp.tile(x, (4, 2, *[1] * (x.ndim - 2))) for x in (h, targets, weights))
    want = dense(h, w, targets, weights)
    split = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "seq"))
    replicated = NamedSharding(mesh, PartitionSpec())
    function = jax.jit(
        jax.value_and_grad(
            lambda h, w, y, m: cross_entropy(h, w, y, m, 24 // pieces, implementation=implementation), argnums=(0, 1)
        ),
        in_shardings=(split, replicated, split, split),
        out_shardings=(replicated, (split, replicated)),
    )
    with jax.set_mesh(mesh):
        compiled = function.lower(h, w, targets, weights).compile()
        placed = [
            jax.device_put(x, s)
            for x, s in zip((h, w, targets, weights), (split, replicated, split, split), strict=True)
        ]
        loss, (dh, dw) = compiled(*placed)
    np.testing.assert_allclose(loss, want[0], rtol=1e-5)
    np.testing.assert_allclose(dh, want[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dw, want[2], rtol=1e-4, atol=1e-4)
    text = compiled.as_text()
    loops, entry = text.split("\nENTRY ")
    assert "while(" in entry and "all-reduce" in entry
    assert not re.search(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(", loops)
    return pieces
