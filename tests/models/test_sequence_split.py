"""Sequences split over devices (`mesh.seq`): equality with one device, collectives, and errors."""

import functools
import importlib
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import batching
from seqjax import sharding
from seqjax.config import from_config_dict
from seqjax.errors import UserError
from seqjax.models import Model
from seqjax.nn import params as params_lib
from seqjax.sharding import (
    batch_sharding,
    heads_to_time,
    layer_gradients_first,
    make_mesh,
    replicated,
    require_equal_pieces,
    rows_to_time,
    shardings,
    time_to_heads,
    time_to_rows,
)
from seqjax.testing import loss_and_grads
from seqjax.training.schedule import optimizer as make_optimizer
from seqjax.training.step import init_state, make_entropy_step, make_train_step, state_shardings
from tests import support
from tests.kernels.test_scans_on_meshes import collectives
from tests.models.test_model import ZERO
from tests.training.test_step_partitioning import WARNING, compile_and_listen

pytestmark = pytest.mark.skipif(jax.device_count() != 8, reason="needs eight devices (XLA_FLAGS is set)")

B, T = 2, 24
MESHES = {"2": {"seq": 2}, "4": {"seq": 4}, "2x2x2": {"fsdp": 2, "seq": 2, "tensor": 2}}
# One head in the scan, or one key and value head in the attention.
REFUSED = {("mamba1", "one"), ("mamba1", "one_dt"), ("mamba1", "bare"), ("top1_chunk", "approx_gqa")}


def mesh_of(name: str) -> jax.sharding.Mesh:
    n_devices = math.prod(MESHES[name].values())
    return make_mesh(**MESHES[name], devices=jax.devices()[:n_devices])


@functools.cache
def reference(mixer: str, variant: str):
    """Return the result on one device; the cache serves consecutive cases of a mixer."""
    model = support.tiny_model(mixer, variant, train__seq_len=T)
    weights, tokens = support.random_params(model), support.random_tokens((B, T + 1))
    return model, weights, tokens, *loss_and_grads(model, weights, tokens)


def is_quick(mixer: str, variant: str, split: str) -> bool:
    """Return whether a case is quick: windowed attention needs the previous device's tokens and compiles fast."""
    return (mixer, variant, split) == ("transformer_pp", "window", "2")


CASES = [
    (mixer, variant, split)
    for mixer, variant in support.CASES
    if (mixer, variant) not in REFUSED
    for split in MESHES
    if split != "4" or "gqa" not in variant  # two key and value heads
]


@pytest.mark.parametrize(("mixer", "variant", "split"), support.slow_unless(is_quick, CASES))
def test_losses_and_gradients_equal_one_device(mixer, variant, split):
    model, weights, tokens, loss, grads = reference(mixer, variant)
    # Half an ulp on KDA's weights moves its gradients by up to 2.5e-5 of their largest entry.
    tol = 2.5e-5 if mixer == "kda" else 1e-5
    assert_equals_one_device(model, weights, tokens, loss, grads, mesh_of(split), tol=tol)


def assert_equals_one_device(model, weights, tokens, loss, grads, mesh, *, tol=1e-5):
    placed = jax.device_put(weights, shardings(mesh, model.shapes, model.axes))
    with jax.set_mesh(mesh):
        got_loss, got_grads = loss_and_grads(model, placed, jax.device_put(tokens, batch_sharding(mesh)))
    np.testing.assert_allclose(got_loss, loss, rtol=1e-6)
    for (name, a), (_, b) in zip(params_lib.names(got_grads), params_lib.names(grads), strict=True):
        if name in ZERO and float(np.abs(b).max()) < 1e-5:
            continue
        np.testing.assert_allclose(a, b, rtol=tol, atol=tol * float(np.abs(b).max()) + 1e-9, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "attention"])
def test_rematerialized_hybrid_equals_one_device(remat):
    """Based: window attention, Taylor attention and convolutions."""
    config = importlib.import_module("configs.based").get_config("debug")
    settings = {"model.n_layers": len(config.model.mixer), "model.vocab_size": 48, "model.remat": remat}
    config.update_from_flattened_dict(settings)
    model = Model(from_config_dict(config).model, max_len=T)
    weights, tokens = support.random_params(model), support.random_tokens((B, T + 1))
    want = loss_and_grads(model, weights, tokens)
    assert_equals_one_device(model, weights, tokens, *want, mesh_of("2"))


@pytest.mark.slow
def test_evaluation_losses_and_entropy_equal_one_device():
    model, weights, tokens, *_ = reference("transformer_pp", "alibi_window_gqa")
    steps = (model.sequence_losses, model.token_losses, lambda p, t: make_entropy_step(model)(p, t, jnp.ones(B)))
    want = [jax.jit(step)(weights, tokens) for step in steps]
    with jax.set_mesh(mesh_of("2")):
        got = [jax.jit(lambda p, t, step=step: step(p, t))(weights, tokens) for step in steps]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


@pytest.mark.parametrize("conv", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attention_is_split_over_time_or_heads(conv):
    """No array has all of the time and all of the width, and nothing is gathered."""
    n_tokens, dim, heads = 96, 32, 4
    settings = {"train__seq_len": n_tokens, "model__loss_chunk": n_tokens, "model__mixer__conv": conv}
    model = support.tiny_model("transformer_pp", **settings)
    tokens, mesh = jax.ShapeDtypeStruct((1, n_tokens + 1), jnp.int32), mesh_of("4")
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(lambda p, t: model.loss(p, t)[0])).lower(model.shapes, tokens).compile()
    program = str(compiled.as_text())
    shapes = {tuple(int(n) for n in dims.split(",")) for dims in re.findall(r"f32\[([\d,]+)\]", program)}
    full_arrays = [shape for shape in shapes if n_tokens in shape and math.prod(shape) % (n_tokens * dim) == 0]
    assert [shape for shape in full_arrays if shape.count(n_tokens) == 1] == []  # scores have the time axis twice
    assert (1, n_tokens // 4, dim) in shapes
    used = collectives(program)
    assert set(used) <= {"all-to-all", "all-reduce", "collective-permute"}, used
    assert set(used["all-to-all"]) == {(1, 1, n_tokens // 4, 1, dim // heads), (1, n_tokens // 4, 1, 1, dim // heads)}


RECURRENT = (
    "comba", "deltanet", "gated_deltanet", "gated_deltaproduct", "gla", "kda", "log_linear_mamba2", "mamba1", "mamba2",
    "mamba3", "mesa_net", "mlstm", "precond_gated_deltanet", "precond_kda", "rwkv5", "rwkv6", "rwkv7",
    "ttt_linear",
)  # fmt: skip


@pytest.mark.parametrize(
    ("mixer", "variant"),
    support.slow_unless(lambda mixer, _: mixer == "mamba2", [case for case in support.FIRST if case[0] in RECURRENT]),
)
def test_recurrences_split_their_activations(mixer, variant):
    """At a length where activations outweigh gradients. Only arrays that heads share may be gathered."""
    n_tokens = 2048
    model = support.tiny_model(mixer, variant, train__seq_len=n_tokens, model__scan_layers=False, model__remat="dots")
    tokens = jax.ShapeDtypeStruct((1, n_tokens + 1), jnp.int32)
    bytes_of, program = {}, ""
    for n_devices in (1, 2):
        mesh = make_mesh(seq=n_devices, devices=jax.devices()[:n_devices])
        with jax.set_mesh(mesh):
            step = jax.jit(jax.grad(lambda p, t: model.loss(p, t)[0]))
            compiled = step.lower(model.shapes, tokens).compile()
        bytes_of[n_devices], program = compiled.memory_analysis().temp_size_in_bytes, str(compiled.as_text())
    assert bytes_of[2] < 0.65 * bytes_of[1], bytes_of
    shared = getattr(model.config.mixers[0], "state", 0)  # B and C
    gathered = [shape for shape in collectives(program).get("all-gather", []) if n_tokens in shape]
    assert max((math.prod(shape) for shape in gathered), default=0) <= n_tokens * shared, gathered


@pytest.mark.parametrize(("scan_layers", "n_devices", "n_barriers"), [(False, 2, 2), (False, 1, 0), (True, 2, 0)])
def test_unrolled_layers_complete_their_gradients_in_order(scan_layers, n_devices, n_barriers):
    """A barrier ends each unrolled layer; otherwise a scheduler could keep all layers' activations to the end."""
    model = support.tiny_model("rwkv7", train__seq_len=T, model__scan_layers=scan_layers)
    tokens = jax.ShapeDtypeStruct((1, T + 1), jnp.int32)
    with jax.set_mesh(make_mesh(seq=n_devices, devices=jax.devices()[:n_devices])):
        program = jax.make_jaxpr(jax.grad(lambda p, t: model.loss(p, t)[0]))(model.shapes, tokens).jaxpr
    layer = sorted(x.shape[1:] for x in jax.tree.leaves(model.shapes["blocks"]))
    activations = [(1, T, 32)] * 2  # the residual stream, and the first layer's values
    barriers = [
        sorted(x.aval.shape for x in eqn.invars) for eqn in program.eqns if eqn.primitive.name == "optimization_barrier"
    ]
    assert barriers == [sorted(layer + activations)] * n_barriers


def test_layer_gradients_first_accepts_integer_carry():
    def loss(x, carry):
        weights, x, carry = layer_gradients_first({"w": 2.0 * x[0, 0]}, x, carry)
        return jnp.sum(x * weights["w"] * carry["count"])

    x, carry = jnp.arange(2 * 12 * 3.0).reshape(2, 12, 3), {"count": jnp.int32(3)}
    want = jax.grad(loss)(x, carry)
    with jax.set_mesh(mesh_of("2")):
        np.testing.assert_array_equal(jax.jit(lambda x, carry: jax.grad(loss)(x, carry))(x, carry), want)


@pytest.mark.slow
@pytest.mark.parametrize(("mixer", "variant"), support.FIRST)
def test_train_step_partitions_without_warning(mixer, variant, capfd):
    config = support.tiny(mixer, variant, train__seq_len=T)
    model, mesh = Model(config.model, max_len=T), mesh_of("2x2x2")
    optimizer = make_optimizer(config.optim)
    shapes = jax.eval_shape(lambda: init_state(model, optimizer, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((1, B, T + 1), jnp.int32)
    in_shardings = (state_shardings(mesh, model, optimizer, shapes), batch_sharding(mesh, leading=1), replicated(mesh))
    with jax.set_mesh(mesh):
        step = make_train_step(model, optimizer)
        _, output = compile_and_listen(
            step, (shapes, tokens, jax.ShapeDtypeStruct((), jnp.float32)), capfd, in_shardings=in_shardings
        )
    assert WARNING not in output, output


def test_kernel_gets_all_of_the_time_for_its_heads():
    """A partitioned function, with array code as the kernel: `tensor` and `seq` split its heads."""
    seen = []

    def kernel(q_BTHK, k_BTGK):
        seen.append((q_BTHK.shape, k_BTGK.shape))
        return q_BTHK * jnp.repeat(jnp.cumsum(k_BTGK, axis=1), 2, axis=2)

    q, k = jnp.ones((2, 12, 8, 3)), jnp.arange(2 * 12 * 4 * 3.0).reshape(2, 12, 4, 3)
    rule = "b t (g r) k, b t g k -> b t (g r) k"
    split = batching.partitioned(kernel, rule, **batching.heads(q, k))
    by_time = jax.P("fsdp", "seq")
    with jax.set_mesh(mesh_of("2x2x2")):
        program = jax.jit(
            lambda q, k: heads_to_time(split(time_to_heads(q), time_to_heads(k))), in_shardings=(by_time, by_time)
        )
        compiled = program.lower(q, k).compile()
        assert seen[-1] == ((1, 12, 2, 3), (1, 12, 1, 3))
        np.testing.assert_array_equal(compiled(*(jax.device_put(x, by_time) for x in (q, k))), kernel(q, k))
    assert "all-to-all" in collectives(str(compiled.as_text()))


def test_time_to_rows_and_back():
    x, before = jnp.arange(2 * 12 * 3.0).reshape(2, 12, 3), -jnp.ones((2, 2, 3))
    padded = np.concatenate([before, x], axis=1)
    want = np.stack([padded[b, 3 * s : 3 * s + 5] for s in range(4) for b in range(2)])

    @jax.jit
    def f(x, before):
        rows = time_to_rows(x)
        return rows, time_to_rows(x, before), rows_to_time(rows, 2)

    with jax.set_mesh(mesh_of("4")):
        rows, with_past, back = f(x, before)
    assert {shard.data.shape for shard in rows.addressable_shards} == {(2, 3, 3)}
    np.testing.assert_array_equal(with_past, want)
    np.testing.assert_array_equal(rows, want[:, 2:])
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize(
    "sizes", [{"data": 1}, {"data": 2}, {"fsdp": 2, "data": 2}, {"seq": 2}, {"data": 2, "seq": 2}], ids=str
)
def test_loss_chunk_is_per_device_on_every_mesh(sizes):
    n_devices = math.prod(sizes.values())
    model = support.tiny_model("transformer_pp", train__seq_len=T, model__loss_chunk=12)
    # 48 tokens per device.
    tokens = support.random_tokens((2 * n_devices // sizes.get("seq", 1), T * sizes.get("seq", 1) + 1))
    mesh = make_mesh(**sizes, devices=jax.devices()[:n_devices])
    with jax.set_mesh(mesh):
        program = jax.make_jaxpr(lambda params, tokens: jax.grad(lambda p: model.loss(p, tokens)[0])(params))
        jaxpr = str(program(model.shapes, tokens))
    assert f"f32[{2 * n_devices},6,{model.config.vocab_size}]" in jaxpr  # logits of 12 tokens per device
    assert "length=4" in jaxpr


def test_indivisible_lengths_and_heads_are_refused():
    mesh = mesh_of("4")
    with pytest.raises(UserError, match=r"config\.mesh\.seq=4 .*config\.train\.seq_len=30"):
        require_equal_pieces(30, mesh)
    require_equal_pieces(32, mesh)
    tokens = jax.ShapeDtypeStruct((B, T + 1), jnp.int32)
    for mixer, variant, heads in (("transformer_pp", "gqa", 2), ("mamba1", "one", 1)):
        model = support.tiny_model(mixer, variant, train__seq_len=T)
        with jax.set_mesh(mesh), pytest.raises(UserError, match=rf"seq=4 .* {heads} heads"):
            jax.eval_shape(model.sequence_losses, model.shapes, tokens)


def test_sequence_devices_are_in_one_process():
    for n_sharing, fits in ((2, True), (4, False)):
        assert sharding._within_processes(np.array([0, 0, 1, 1]), n_sharing) == fits
    assert not sharding._within_processes(np.array([0, 1, 0, 1]), 2)


def test_indivisible_prompts_are_not_split():
    """With a convolution that is longer than a piece of the shorter prompt."""
    model = support.tiny_model("mamba2", "full", train__seq_len=T)
    weights, logits = support.random_params(model), jax.jit(model.prefill)
    for n_tokens in (4, 7):
        tokens, cache = support.random_tokens((1, n_tokens)), model.init_cache(1, T)
        want, _ = logits(weights, tokens, cache)
        with jax.set_mesh(mesh_of("2")):
            got, _ = jax.jit(lambda p, t, c: model.prefill(p, t, c))(weights, tokens, cache)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
