"""Optional parts of a block: Canon convolutions, token shift, and mixers with an optional part switched off.

test_against_numpy.py compares their equations in full models.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax import testing
from seqjax.errors import UserError
from seqjax.mixers._rwkv import lerps
from seqjax.models import flops
from seqjax.models.block import PreNormCache
from seqjax.nn import params as params_lib
from seqjax.nn.short_conv import TokenShift
from tests import support
from tests.models.test_sequence_split import B, assert_equals_one_device, mesh_of
from tests.models.test_sequence_split import T as EVEN

T = 23
ALL = {"model__canon": "ACD", "model__token_shift": True}
CASES = {
    "attention": ("transformer_pp", ALL | {"model__mixer__conv": True, "model__mixer__gate": True}),
    "delta": ("gated_deltanet", ALL | {"model__mixer__conv": False, "model__mixer__gate": False}),
    "no_mlp": ("mamba2", {"model__canon": "A", "model__token_shift": True, "model__mixer__conv": False}),
    "window": ("transformer_pp", ALL | {"model__mixer__window": 2, "model__mlp__kind": "gelu"}),
    "top1": ("top1_chunk", ALL | {"model__mixer__selection": "approx", "model__mixer__gate": True}),
}
QUICK = ("attention", "delta", "no_mlp")
QUICK_CHECKS = {
    "attention": ("output", "causality", "step"),
    "delta": ("causality",),
    "no_mlp": ("step",),
}
all_cases = pytest.mark.parametrize("name", support.slow_unless(lambda name: name in QUICK, CASES))
one_case = pytest.mark.parametrize("name", support.slow_unless(lambda name: name == "attention", CASES))
PARTS = {"canon_a", "canon_c", "up_conv", "gate_conv", "token_shift"}


@functools.cache
def case_of(name):
    mixer, settings = CASES[name]
    small = {"model__mixer__state": 8, "model__mixer__head_dim": 16} if mixer == "mamba2" else {}
    return testing.Case(support.tiny_model(mixer, **settings, **small))


def without_switches(name):
    """Return the case's model without Canon convolutions and token shift."""
    return case_of(name).changed(canon="none", token_shift=False)


def without_parts(tree):
    return {k: without_parts(x) for k, x in tree.items() if k not in PARTS} if isinstance(tree, dict) else tree


def in_block(tree):
    return {key.removeprefix("blocks.0."): x for key, x in params_lib.names(tree) if key.startswith("blocks.0.")}


# ------------------------------------------------------------------------------------------------------------ contract
@pytest.mark.parametrize(
    ("name", "check"),
    support.slow_unless(
        lambda name, check: check in QUICK_CHECKS.get(name, ()),
        [(name, check) for name in CASES for check in testing.CHECKS if check not in ("chunk_size", "flops")],
    ),
)
def test_contract(name, check):
    testing.CHECKS[check](case_of(name))


@all_cases
def test_flops_against_xla(name):
    # XLA counts all scores; a window and Top-1 Chunk use a small part of them (test_contract.py).
    testing.check_flops(case_of(name), 0.6 if name in ("window", "top1") else 0.75)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() != 8, reason="needs eight devices (XLA_FLAGS is set)")
@pytest.mark.parametrize("split", ["2", pytest.param("2x2x2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["attention", pytest.param("delta", marks=pytest.mark.slow)])
def test_sequence_split_equals_one_device(name, split):
    model, tokens = case_of(name).model, support.random_tokens((B, EVEN + 1))
    weights = support.random_params(model)
    assert_equals_one_device(model, weights, tokens, *testing.loss_and_grads(model, weights, tokens), mesh_of(split))


@one_case
def test_prefill_in_pieces_equals_the_parallel_form(name):
    """Pieces shorter and longer than the filters, and single tokens."""
    case = case_of(name)
    tokens = case.tokens((2, T))
    want = case.logits(case.params, tokens)
    logits, cache = case.prefill(case.params, tokens[:, :2], case.model.init_cache(2, T))
    got, start = {1: logits}, 2
    for n in (1, 3, 9):
        logits, cache = case.prefill_next(case.params, tokens[:, start : start + n], jnp.asarray(start), cache)
        start += n
        got[start - 1] = logits
    for t in range(start, T):
        got[t], cache = case.step(case.params, tokens[:, t], jnp.asarray(t), cache)
    for t, logits in got.items():
        np.testing.assert_allclose(logits, want[:, t], rtol=2e-4, atol=2e-4, err_msg=f"token {t}")


def test_bfloat16_decoding_equals_the_parallel_form():
    """The cache stores the last inputs in their own dtype, bfloat16, so nothing is rounded twice."""
    case = case_of("attention")
    model, tokens = case.changed(dtype="bfloat16"), case.tokens((2, T))
    want, cache = jax.jit(model.logits)(case.params, tokens), model.init_cache(2, T)
    assert {x.dtype.name for x in jax.tree.leaves(cache)} == {"bfloat16", "int32"}
    step = jax.jit(model.step)
    for t in range(T):
        logits, cache = step(case.params, tokens[:, t], jnp.asarray(t), cache)
        # The programs round hidden states to 8 bits at different points: logits up to 4.9 differ by up to 0.05.
        np.testing.assert_allclose(logits, want[:, t], rtol=0, atol=0.02 * float(jnp.abs(want).max()))


# ---------------------------------------------------------------------------------------------- sizes, starts, neutrals
def test_parameters_flops_and_state_by_hand():
    """Width 32, MLP 48. Canon: 4 taps per channel, 3 cached inputs; token shift: 1 mu, 1 cached input."""
    inner = {"geglu": 2 * 48, "gelu": 48}
    for kind, canon, shift, taps in (
        ("geglu", "A", False, 4 * 32),
        ("geglu", "C", False, 4 * 32),
        ("geglu", "D", False, 4 * inner["geglu"]),
        ("gelu", "D", False, 4 * inner["gelu"]),
        ("geglu", "none", True, 0),
        ("geglu", "ACD", True, 4 * (2 * 32 + inner["geglu"])),
    ):
        settings = {"model__mlp__kind": kind, "model__canon": canon, "model__token_shift": shift}
        model = support.tiny_model("transformer_pp", **settings)
        base = support.tiny_model("transformer_pp", model__mlp__kind=kind)
        assert flops.n_params(model) - flops.n_params(base) == 2 * (taps + 32 * shift)
        assert flops.flops_per_token(model, T) - flops.flops_per_token(base, T) == 3 * 2 * 2 * taps
        new, old = (m.abstract_blocks()[0].state_size(T) for m in (model, base))
        assert new - old == taps // 4 * 3 + 32 * shift


@one_case
def test_switches_do_not_change_other_parameters_or_caches(name):
    case, base = case_of(name), without_switches(name)
    params, base_params = (jax.jit(m.init)(jax.random.key(0)) for m in (case.model, base))
    added = set(in_block(params)) - set(in_block(base_params))
    assert {key.split(".")[-2] for key in added} <= PARTS
    for key, x in in_block(base_params).items():
        np.testing.assert_array_equal(in_block(params)[key], x, err_msg=key)
    for model, kind in ((case.model, True), (base, False)):
        cache = jax.eval_shape(lambda model=model: model.init_cache(2, T))[0]["0"]
        assert isinstance(cache, PreNormCache) == kind


@all_cases
def test_zero_taps_and_mu_disable_the_switches(name):
    case, tokens = case_of(name), support.random_tokens((2, T))
    zeroed = jax.tree_util.tree_map_with_path(lambda path, x: x * PARTS.isdisjoint(k.key for k in path), case.params)
    want = jax.jit(without_switches(name).logits)(without_parts(case.params), tokens)
    np.testing.assert_allclose(case.logits(zeroed, tokens), want, rtol=1e-5, atol=1e-5)
    assert np.abs(case.logits(case.params, tokens) - want).max() > 0.1


def test_token_shift_equals_rwkv_and_starts_as_rwkv5():
    model = support.tiny_model("transformer_pp", model__token_shift=True)
    shift = model.init(jax.random.key(0))["blocks"]["0"]["token_shift"]["mu"]
    for layer in range(2):
        np.testing.assert_allclose(shift[layer], 1 - (np.arange(32) / 32) ** (1 - layer / 2), rtol=1e-6, atol=1e-7)
    second = jax.tree.map(lambda x: x[1], support.random_params(model)["blocks"]["0"])
    module: TokenShift = model.blocks["0"].bind(second).token_shift
    x_BTD = jnp.asarray(np.random.default_rng(0).standard_normal((2, 9, 32), np.float32))
    for last_BD in (None, x_BTD[:, 3]):
        (want,) = lerps(x_BTD, last_BD, (module.mu[...],))
        got = module(x_BTD, None if last_BD is None else last_BD[:, None])
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize(
    ("mixer", "settings", "message"),
    [
        ("mamba2", {"model__canon": "ACD"}, r"canon='ACD' .*mlp\.kind='none'.*config\.model\.canon='A'"),
        ("mamba2", {"model__canon": "D"}, r"mlp\.kind='none'.*config\.model\.canon='none'"),
        ("rwkv7", {"model__canon": "A"}, r"canon='A' .*rwkv7.*config\.model\.canon='none'"),
        ("rwkv7_shell", {"model__token_shift": True}, r"rwkv7_shell.*config\.model\.token_shift=False"),
        ("transformer_pp", {"model__canon": "CA"}, "canon='CA'"),
        ("transformer_pp", {"model__canon": "B"}, "canon='B'"),
    ],
)
def test_inapplicable_switches_are_refused(mixer, settings, message):
    with pytest.raises(UserError, match=message):
        support.tiny(mixer, **settings)
