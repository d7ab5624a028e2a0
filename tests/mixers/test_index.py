"""MSA and DSA: stored references, limits, rematerialisation and bad inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kernels_pallas
from seqjax import mixers, testing
from seqjax.errors import UserError
from seqjax.nn.params import Template, names
from tests import support
from tests.mixers.test_golden_ssm import close, golden, tree
from tests.models.test_model import count_primitive

T = 23
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 4, "index_dim": 6, "index_rope": 4}
SETTINGS = {
    "msa": SIZES | {"block_size": 3, "blocks": 3},
    "dsa": SIZES | {"index_heads": 3, "top_k": 6},
}
both = pytest.mark.parametrize("name", SETTINGS)


@both
def test_layers_and_losses_match_the_references(name):
    """Both objectives at once: each reaches its parameters only."""
    arrays = golden(name)
    template = Template(lambda rngs, _: mixers.load(name)(8, **SETTINGS[name], rngs=rngs))
    params, x = tree(arrays, "p."), jnp.asarray(arrays["x"])
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, template.shapes)
    assert {path.split(".")[0] for path, group in names(template.groups) if group == "auxiliary"} == {"index"}

    def objective(params, x):
        y, loss = template.bind(params).call_with_loss(x)
        return jnp.sum(y * arrays["weight"]) + loss, (y, loss)

    (_, (y, loss)), (grads, dx) = jax.jit(jax.value_and_grad(objective, argnums=(0, 1), has_aux=True))(params, x)
    close(y, arrays["y"])
    close(jax.jit(lambda p: template.bind(p)(x))(params), arrays["y"])
    assert float(loss) == pytest.approx(float(arrays["loss"]), rel=1e-5)
    close((grads, dx), (tree(arrays, "g."), arrays["dx"]), 5e-5)
    close(grads["index"], tree(arrays, "g.index."), 1e-6)


@pytest.mark.slow
@both
def test_the_contract_of_an_auxiliary_loss(name):
    case = testing.Case(support.tiny_model(name, dict(support.FIRST)[name]))
    testing.check_auxiliary_loss(case)


@pytest.mark.parametrize(
    ("name", "most"),
    [pytest.param("msa", {"block_size": 4, "blocks": 6}, marks=pytest.mark.slow), ("dsa", {"top_k": T})],
)
def test_an_index_that_chooses_every_key_gives_full_attention(name, most):
    options = {"heads": 4, "kv_heads": 2}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, T, 16)), jnp.float32)
    mixer = mixers.load(name)(16, **options, **most, qk_norm=False, rngs=nnx.Rngs(1))
    full = mixers.TransformerPP(16, **options, rngs=nnx.Rngs(0))
    for part in ("q", "k", "v", "out"):
        setattr(full, part, getattr(mixer, part))
    np.testing.assert_allclose(nnx.jit(mixer)(x), nnx.jit(full)(x), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_msa_reads_the_blocks_of_select_chunk():
    mixer = mixers.MSA(16, heads=4, kv_heads=2, block_size=4, blocks=3, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    q, k, v, *index = (jnp.asarray(rng.normal(size=(2, T, n, 4)), jnp.float32) for n in (4, 2, 2, 2, 1))
    sel = kernels_pallas.select_chunk(*index, chunk_size=4, selection="best_key", top_k=2)
    want = kernels_pallas.selected_chunk_attention(q, k, v, jnp.repeat(sel, 2, axis=2), chunk_size=4)
    np.testing.assert_array_equal(nnx.jit(lambda mixer, *x: mixer.attend(*x))(mixer, q, k, v, *index), want)


@pytest.mark.parametrize(
    ("name", "remat"),
    support.slow_unless(
        lambda *case: case == ("dsa", "full"), [(n, r) for n in SETTINGS for r in ("full", "attention", "dots")]
    ),
)
def test_rematerialisation_does_not_choose_again(name, remat):
    """The choice of DSA has a loop over the bits of a score, and the choice of MSA an argmax."""
    primitive = {"msa": "argmax", "dsa": "cumsum"}[name]
    counts = []
    for policy in ("none", remat):
        model = support.tiny_model(name, dict(support.FIRST)[name], model__remat=policy, model__n_layers=1)
        tokens = jax.ShapeDtypeStruct((2, T + 1), jnp.int32)

        counts.append(
            count_primitive(
                jax.make_jaxpr(jax.grad(functools.partial(testing.objective, model)))(model.shapes, tokens).jaxpr,
                primitive,
            )
        )
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("msa", {"blocks": 1}, "mixer.blocks=1 .*at least 2"),
        ("msa", {"blocks": 7}, "mixer.blocks=7 .*6 blocks.*config.train.seq_len=23"),
        ("msa", {"block_size": 24}, "mixer.block_size=24 .*config.train.seq_len=23"),
        ("msa", {"index_rope": 3}, "mixer.index_rope=3 .*even"),
        ("msa", {"index_dim": 0}, "mixer.index_dim .*1"),
        ("msa", {"kv_heads": 3}, "mixer.kv_heads=3 .*heads=4"),
        ("dsa", {"top_k": 24}, "mixer.top_k=24 .*23 keys.*config.train.seq_len=23"),
        ("dsa", {"top_k": 0}, "mixer.top_k .*1"),
        ("dsa", {"index_heads": 0}, "mixer.index_heads .*1"),
        ("dsa", {"index_rope": 10}, "mixer.index_rope=10 .*index_dim=8"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(name, settings, message):
    changes = {f"model__mixer__{key}": value for key, value in settings.items()}
    with pytest.raises(UserError, match=message):
        support.tiny_model(name, dict(support.FIRST)[name], **changes)
