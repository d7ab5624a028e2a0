"""mLSTM against the xLSTM layer in transformers, and at its limits.

tests/golden/make_xlstm.py created the arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from seqjax import mixers
from seqjax.errors import UserError
from seqjax.nn.params import Template
from tests import support

NAMES = {
    "q": "q", "k": "k", "v": "v", "gate": "ogate_preact", "input": "igate_preact", "forget": "fgate_preact",
    "out": "out_proj",
}  # fmt: skip


def under_our_names(z, part):
    p = {key.removeprefix(f"{part}/"): x for key, x in z.items() if key.startswith(f"{part}/")}
    return {
        **{ours: {"w": p[f"{theirs}.weight"].T} for ours, theirs in NAMES.items()},
        "input_bias_H": p["igate_preact.bias"],
        "forget_bias_H": p["fgate_preact.bias"],
        "gain_E": p["multihead_norm.weight"],
    }


@pytest.mark.parametrize("chunk", support.slow_unless(lambda chunk: chunk == 8, [1, 8, 64]))
def test_layer_matches_transformers(chunk):
    """Compare the output and all gradients.

    Gates are computed from weights and at both caps.
    """
    with np.load(support.ROOT / "tests/golden/mlstm.npz") as file:
        z = {key: jnp.asarray(file[key]) for key in file}
    template = Template(lambda rngs, _: mixers.MLSTM(16, heads=2, chunk_size=chunk, rngs=rngs))

    @jax.jit
    def run(params, x):
        y = template.bind(params)(x)
        return jnp.sum(y * z["g"]), y

    (_, y), (d_params, d_x) = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(under_our_names(z, "p"), z["x"])
    want = {"y": z["y"], "d_x": z["d_x"], "params": under_our_names(z, "d")}
    got = {"y": y, "d_x": d_x, "params": d_params}
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for name, one in jax.tree_util.tree_leaves_with_path(want):
        of_got = dict(jax.tree_util.tree_leaves_with_path(got))[name]
        np.testing.assert_allclose(of_got, one, rtol=0, atol=2e-5 * float(np.abs(one).max()), err_msg=str(name))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gates_at_their_caps_leave_everything_finite(dtype):
    """Without forgetting, give each token weight e^15, then e^-15.

    With e^-15 the normaliser is nearly zero.
    """
    mixer = mixers.MLSTM(16, heads=2, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, 512, 16), dtype)

    @nnx.jit
    def gradient(mixer, x):
        return jax.value_and_grad(lambda x: jnp.sum(mixer(x).astype(jnp.float32) ** 2))(x)

    for bias in (1e3, -1e3):
        mixer.input_bias_H[...], mixer.forget_bias_H[...] = jnp.full(2, bias), jnp.full(2, 1e3)
        y, d_x = gradient(mixer, x)
        assert np.isfinite(y) and np.isfinite(d_x.astype(jnp.float32)).all()


@pytest.mark.parametrize("cap", [0.0, 31.0])
def test_invalid_gate_caps_are_refused(cap):
    with pytest.raises(UserError, match=r"gate_cap=.*30"):
        mixers.MLSTM(16, heads=2, gate_cap=cap, rngs=nnx.Rngs(0))
