"""The delta-rule family against arrays from public references.

tests/golden/make_delta.py and make_rwkv7.py created the arrays.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kernels_pallas
from seqjax import mixers
from seqjax.models import Model
from seqjax.nn.params import Template
from seqjax.ops import gated_delta_rule, wkv7
from tests import support

ARGS = {
    "delta": ("q", "k", "v", "beta"),
    "gated": ("q", "k", "v", "beta", "log_g"),
    "wkv7": ("q", "k", "v", "log_w", "a", "b"),
}


@functools.cache
def golden(name):
    with np.load(support.ROOT / f"tests/golden/{name}.npz") as file:
        return {key: jnp.asarray(file[key]) for key in file}


def assert_close(got, want, tol=2e-5):
    np.testing.assert_allclose(got, want, rtol=0, atol=tol * max(1e-3, float(np.abs(want).max())))


@pytest.mark.parametrize("chunk", support.slow_unless(lambda chunk: chunk == 8, [1, 8, None]))
@pytest.mark.parametrize("kind", ARGS)
def test_ops_and_gradients_match_the_references(kind, chunk):
    """Compare with flash-linear-attention's naive recurrences and torch's autograd.

    The recurrences start from an initial state.
    """
    z, op = golden("delta"), wkv7 if kind == "wkv7" else gated_delta_rule

    @jax.jit
    def run(args, state):
        o, last = op(*args, initial_state=state, return_state=True, chunk_size=chunk)
        return jnp.sum(o * z["g_o"]) + jnp.sum(last), (o, last)

    args = [z[name] for name in ARGS[kind]]
    (_, (o, last)), grads = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(args, z["state"])
    assert_close(o, z[f"{kind}/o"])
    assert_close(last, z[f"{kind}/last"])
    for name, grad in zip((*ARGS[kind], "state"), (*grads[0], grads[1]), strict=True):
        assert_close(grad, z[f"{kind}/d_{name}"])


def layer_params(z, part):
    """Rename the parameters of transformers' OlmoHybridGatedDeltaNet.

    Its single convolution covers the concatenated q, k and v.
    """
    p = {key.removeprefix(f"layer/{part}/"): x for key, x in z.items() if key.startswith(f"layer/{part}/")}
    q, k, v = jnp.split(p["conv1d.weight"][:, 0], [12, 24])
    linear = {"q": "q", "k": "k", "v": "v", "beta": "b", "decay": "a", "gate": "g", "out": "o"}
    return {
        **{ours: {"w": p[f"{theirs}_proj.weight"].T} for ours, theirs in linear.items()},
        "q_conv": {"w": q},
        "k_conv": {"w": k},
        "v_conv": {"w": v},
        "norm": {"g": p["o_norm.weight"]},
        "log_rate_H": p["A_log"],
        "step_bias_H": p["dt_bias"],
    }


def test_gated_deltanet_layer_matches_transformers():
    """Compare the output and all parameter gradients.

    The reference norm has eps 1e-5, fla's models 1e-6.
    """
    z = golden("delta")
    template = Template(lambda rngs, _: mixers.GatedDeltaNet(16, heads=2, norm_eps=1e-5, chunk_size=4, rngs=rngs))

    @jax.jit
    def run(params, x):
        y = template.bind(params)(x)
        return jnp.sum(y * z["layer/g"]), y

    (_, y), (d_params, d_x) = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(layer_params(z, "p"), z["layer/x"])
    assert_close(y, z["layer/y"])
    assert_close(d_x, z["layer/d_x"])
    jax.tree.map(assert_close, d_params, layer_params(z, "d"))


def rwkv7_params(z):
    """Rename the official parameters and stack the layers.

    The first layer's v-LoRA is absent and unused.
    """

    def stacked(*path, transpose=False):
        layers = [z.get("blocks.{}.{}".format(i, ".".join(path))) for i in range(2)]
        x = jnp.stack(layers)
        return jnp.swapaxes(x, 1, 2) if transpose else x

    def norm(name):
        return {"g": stacked(name, "weight"), "b": stacked(name, "bias")}

    def linear(*path):
        return {"w": stacked(*path, "weight", transpose=True)}

    def lora(name):
        both = {"a": stacked("att", f"{name}1"), "b": stacked("att", f"{name}2")}
        return both if name == "g" else both | {"bias": stacked("att", f"{name}0")}

    mixer = {
        "mu": {name: stacked("att", f"x_{name}") for name in "rwkvag"},
        "r": linear("att", "receptance"), "k": linear("att", "key"), "v": linear("att", "value"),
        "out": linear("att", "output"), **{f"{name}_lora": lora(name) for name in "wavg"},
        "k_k": stacked("att", "k_k"), "k_a": stacked("att", "k_a"), "r_k": stacked("att", "r_k").reshape(2, -1),
        "norm": norm("att.ln_x"),
    }  # fmt: skip
    mlp = {"mu_k": stacked("ffn", "x_k"), "k": linear("ffn", "key"), "v": linear("ffn", "value")}
    first = {"g": z["blocks.0.ln0.weight"], "b": z["blocks.0.ln0.bias"]}
    return {
        "embed": z["emb.weight"],
        "embed_norm": first,
        "norm": {"g": z["ln_out.weight"], "b": z["ln_out.bias"]},
        "head": z["head.weight"].T,
        "blocks": {"0": {"mixer": mixer, "mlp": mlp, "norm1": norm("ln1"), "norm2": norm("ln2")}},
    }


@pytest.mark.parametrize("chunk", [4, pytest.param(64, marks=pytest.mark.slow)])
def test_rwkv7_model_matches_the_rwkv_package(chunk):
    """Compare the logits of a whole model with the `rwkv` package."""
    z = golden("rwkv7")
    ranks = {f"model__mixer__{name}_rank": 4 for name in ("decay", "eta", "value", "gate")}
    config = support.tiny(
        "rwkv7", model__dim=16, model__mixer__heads=2, model__vocab_size=24, model__mlp__dim=64,
        model__tie_embeddings=False, model__mixer__chunk_size=chunk, **ranks,
    )  # fmt: skip
    model = Model(config.model, max_len=13)
    weights = rwkv7_params(z)
    assert jax.tree.map(jnp.shape, weights) == jax.tree.map(lambda x: x.shape, model.shapes)
    assert_close(jax.jit(model.logits)(weights, z["tokens"][None])[0], z["logits"])


@pytest.mark.parametrize(
    "name",
    [
        *("comba", "deltanet", "gated_deltanet", "gated_deltaproduct", "gla", "kda", "mlstm", "precond_gated_deltanet"),
        *("precond_kda", "rwkv5", "rwkv6", "rwkv7"),
    ],
)
def test_implementation_selects_the_backend(name):
    heads = {"head_dim": 8} if name in ("rwkv5", "rwkv6") else {"heads": 2}
    op = "delta_rule" if "delta" in name.removeprefix("precond_gated_delta") else "linear_attention"
    op = "kda" if name == "kda" else op
    made = lambda: mixers.load(name)(16, **heads, implementation="pallas", rngs=nnx.Rngs(0))  # noqa: E731
    x_BTD = jnp.ones((1, 4, 16))
    for call in (lambda m: m(x_BTD), lambda m: m.prefill(x_BTD, m.init_cache(1, 4, jnp.float32))):
        with pytest.raises(kernels_pallas.BackendError, match=f"{op} cannot run with implementation=.pallas."):
            jax.eval_shape(lambda call=call: call(made()))
