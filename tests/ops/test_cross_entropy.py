"""The streamed cross-entropy against the dense one in float64, and that it does not hold the logits of the batch."""

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

B, T, D, O = 3, 11, 8, 29  # 11 is a prime: no chunk but 1 and 11 divides it


def problem(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    h = jnp.asarray(2 * rng.standard_normal((B, T, D)), dtype)
    w = jnp.asarray(rng.standard_normal((D, O)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, O, (B, T)), jnp.int32)
    weights = jnp.asarray(rng.random((B, T)) * (rng.random((B, T)) < 0.7), jnp.float32)
    return h, w, targets, weights


def dense(h, w, targets, weights):
    """Loss, dL/dh and dL/dw in float64."""
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
    """Chunks below the batch size, that do not divide T, of exactly the batch, and larger than it."""
    h, w, targets, weights = problem()
    want = dense(h, w, targets, weights)
    function = jax.jit(jax.value_and_grad(lambda h, w: cross_entropy(h, w, targets, weights, chunk), argnums=(0, 1)))
    loss, (dh, dw) = function(h, w)
    np.testing.assert_allclose(loss, want[0], rtol=1e-5)
    np.testing.assert_allclose(dh, want[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dw, want[2], rtol=1e-4, atol=1e-5)
    assert (np.asarray(dh)[np.asarray(weights) == 0] == 0).all()
    # without a gradient another branch runs
    np.testing.assert_allclose(cross_entropy(h, w, targets, weights, chunk), loss, rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 9, 33, 4096])
def test_losses_of_tokens(chunk):
    """Each at its place, whatever the chunks; their sums are those of the sequences."""
    h, w, targets, _ = problem()
    got = jax.jit(token_losses, static_argnums=3)(h, w, targets, chunk)
    logits = np.asarray(h, np.float64) @ np.asarray(w, np.float64)
    hit = np.take_along_axis(logits, np.asarray(targets)[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(got, np.log(np.exp(logits).sum(-1)) - hit, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.sum(got, 1), sequence_losses(h, w, targets, chunk), rtol=1e-6)


def test_a_bfloat16_model_whose_table_is_its_head():
    """One chunk for the whole batch and a transposed gradient: XLA refuses this product in bfloat16 on a CPU."""
    h, w, targets, weights = problem(jnp.bfloat16)
    table = w.T.astype(jnp.bfloat16)
    function = jax.jit(jax.grad(lambda h, t: cross_entropy(h, t.T, targets, weights, 4096), argnums=(0, 1)))
    dh, dtable = function(h, table.astype(jnp.float32))
    _, want_dh, want_dw = dense(h, table.T, targets, weights)
    scale = np.abs(want_dw).max()  # the gradient of the logits is rounded to bfloat16, half a unit in 2^8
    np.testing.assert_allclose(dtable, want_dw.T, atol=scale * 2**-8)
    np.testing.assert_allclose(dh.astype(np.float32), want_dh, atol=np.abs(want_dh).max() * 2**-6)


def test_the_cotangent_scales_the_gradient():
    h, w, targets, weights = problem()
    one = jax.grad(lambda h: cross_entropy(h, w, targets, weights, 9))(h)
    three = jax.grad(lambda h: -3 * cross_entropy(h, w, targets, weights, 9))(h)
    np.testing.assert_allclose(three, -3 * np.asarray(one), rtol=1e-5)


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
def test_the_logits_of_the_batch_are_never_there(with_grad):
    """Temporary memory of the compiled program: far below [B, T, O], and growing with the chunk."""
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
def shares(monkeypatch):
    """Array code in the place of the Triton launch, so that the rules around it are tested; the shapes it is given."""
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
def test_devices_add_up_their_gradients_once(sizes):
    """Tokens on several devices: the dense numbers, and nothing goes between devices while there are chunks."""
    add_up_once(sizes, None)


@eight_devices
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_device_runs_the_kernel_on_its_own_tokens(shares, sizes):
    """29 tokens in a vocabulary are whole on every device, also where `tensor` is 2."""
    pieces = add_up_once(sizes, "triton")
    rows, length = 12 * sizes.get("seq", 1), 22 // sizes.get("seq", 1)
    assert shares[-1] == (rows // pieces, min(length, 24 // rows), O)


@eight_devices
def test_a_vocabulary_that_devices_share_is_xla_s(shares):
    """By name Triton refuses it; where the sizes do not divide it, it is whole."""
    mesh = make_mesh(tensor=2, devices=jax.devices()[:2])
    h, w, targets, weights = problem()
    even = jnp.pad(w, ((0, 0), (0, 1)), constant_values=-1e9)
    with jax.set_mesh(mesh):
        function = jax.jit(cross_entropy, static_argnames=("chunk", "implementation"))
        with pytest.raises(kernels_pallas.BackendError, match="triton: devices share the vocabulary"):
            function(h, even, targets, weights, implementation="triton")
        np.testing.assert_allclose(
            function(h, w, targets, weights, implementation="triton"), dense(*problem())[0], rtol=1e-6
        )
    assert shares


def add_up_once(sizes, implementation):
    """How many pieces the tokens of 12 sequences of 22 were in."""
    n_devices = math.prod(sizes.values())
    mesh = make_mesh(**sizes, devices=jax.devices()[:n_devices])
    pieces = n_devices // sizes.get("tensor", 1)
    h, w, targets, weights = problem()
    h, targets, weights = (jnp.tile(x, (4, 2, *[1] * (x.ndim - 2))) for x in (h, targets, weights))
    want = dense(h, w, targets, weights)
    split = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "seq"))
    whole = NamedSharding(mesh, PartitionSpec())
    function = jax.jit(
        jax.value_and_grad(
            lambda h, w, y, m: cross_entropy(h, w, y, m, 24 // pieces, implementation=implementation), argnums=(0, 1)
        ),
        in_shardings=(split, whole, split, split),
        out_shardings=(whole, (split, whole)),
    )
    with jax.set_mesh(mesh):
        compiled = function.lower(h, w, targets, weights).compile()
        placed = [
            jax.device_put(x, s) for x, s in zip((h, w, targets, weights), (split, whole, split, split), strict=True)
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
