"""Import and export of public weights: logits, round trips, file layouts.

tests/golden/convert holds tiny models saved by transformers and fla (make_convert.py).
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from seqjax.config import Config
from seqjax.convert import export_weights, import_weights
from seqjax.errors import UserError
from seqjax.models import Model
from tests.convert.cases import CASES, GOLDEN, assert_equal_trees, config_of, copied


def logits(config: Config, params, tokens) -> np.ndarray:
    return np.asarray(jax.jit(Model(config.model, max_len=config.train.seq_len).logits)(params, tokens))


# -------------------------------------------------------------------------------------------------------------- parity
@pytest.mark.parametrize("family", CASES)
def test_logits_equal_the_public_model(family):
    """float32 logits differ by at most 2e-6 of the largest logit; Gated DeltaNet by 1e-5.

    Gated DeltaNet's maximum is at one token with head outputs near zero, which the head norm magnifies. The logits of
    this token move by 4e-6 if every weight changes by about half a unit in the last place.
    """
    io = np.load(GOLDEN / family / "io.npz")
    config = config_of(family)
    got = logits(config, import_weights(GOLDEN / family, config), io["tokens"])
    np.testing.assert_allclose(got, io["logits"], rtol=0, atol=2e-5 * np.abs(io["logits"]).max())


def test_windowed_llama_is_a_mistral(tmp_path):
    io = np.load(GOLDEN / "llama" / "io.npz")
    path, _ = copied("llama", tmp_path, with_config=True, model_type="mistral", sliding_window=5)
    with pytest.raises(UserError, match=r"sliding_window is 5, .* None \(model\.mixer\.window=5\)"):
        import_weights(path, config_of("llama"))
    config = config_of("llama", model__mixer__window=5)
    got = logits(config, import_weights(path, config), io["tokens"])
    np.testing.assert_allclose(got, io["logits_window"], rtol=0, atol=1e-5 * np.abs(io["logits_window"]).max())
    assert np.abs(io["logits"] - io["logits_window"]).max() > 0.1
    export_weights(import_weights(path, config), config, tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "mistral"


# --------------------------------------------------------------------------------------------------------- round trips
@pytest.mark.parametrize("family", CASES)
def test_export_equals_the_public_file(family, tmp_path):
    """Equal tensor names, shapes and float16 bits, and equal values for all shared config.json keys."""
    config = config_of(family)
    params = import_weights(GOLDEN / family, config)
    export_weights(params, config, tmp_path / "model.safetensors", dtype="float16")
    got, want = (safetensors.numpy.load_file(d / "model.safetensors") for d in (tmp_path, GOLDEN / family))
    assert {k: (x.shape, x.dtype) for k, x in got.items()} == {k: (x.shape, x.dtype) for k, x in want.items()}
    for name, x in want.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)
    exported_config, public = (json.loads((d / "config.json").read_text()) for d in (tmp_path, GOLDEN / family))
    may_differ = {"max_position_embeddings", "n_inner"}  # the training length; null there means 4 times the width
    may_differ |= {"bos_token_id", "eos_token_id", "pad_token_id"}  # known only with a tokenizer
    different = {
        k for k in exported_config.keys() & public.keys() - may_differ if exported_config[k] != pytest.approx(public[k])
    }
    assert not different
    assert {
        "model_type",
        "architectures",
        "vocab_size",
        "tie_word_embeddings",
    } <= exported_config.keys() & public.keys()


def random_params(config):
    rng, model = np.random.default_rng(0), Model(config.model, max_len=config.train.seq_len)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), model.shapes)


@pytest.mark.parametrize("family", CASES)
def test_import_restores_the_exported_params(family, tmp_path):
    config = config_of(family)
    params = random_params(config)
    if family == "rwkv7":  # The first layer does not use its v-LoRA, so no public file holds it.
        lora = params["blocks"]["0"]["mixer"]["v_lora"]
        params["blocks"]["0"]["mixer"]["v_lora"] = {k: np.concatenate([0 * x[:1], x[1:]]) for k, x in lora.items()}
    export_weights(params, config, tmp_path / "w.safetensors")
    assert_equal_trees(import_weights(tmp_path, config), params)


@pytest.mark.parametrize(("bos", "eos"), [(0, 1), (1, 0), (None, 0), (None, None)])
def test_export_writes_bos_and_eos_ids(tmp_path, bos, eos):
    """0 is an id; null means no id."""
    config = config_of("gpt2")
    export_weights(random_params(config), config, tmp_path / "model.safetensors", bos=bos, eos=eos)
    exported_config = json.loads((tmp_path / "config.json").read_text())
    assert (exported_config["bos_token_id"], exported_config["eos_token_id"]) == (bos, eos)


def test_llama_biases_and_tied_head(tmp_path):
    changes = {"model__mixer__bias": True, "model__mlp__bias": True, "model__tie_embeddings": True}
    config = config_of("llama", model__mlp__kind="geglu", **changes)
    params = random_params(config)
    export_weights(params, config, tmp_path / "model.safetensors")
    exported_config = json.loads((tmp_path / "config.json").read_text())
    assert (exported_config["attention_bias"], exported_config["mlp_bias"], exported_config["tie_word_embeddings"]) == (
        True,
        True,
        True,
    )
    assert exported_config["hidden_act"] == "gelu"
    assert exported_config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e4}
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert stored["model.layers.2.self_attn.k_proj.bias"].shape == (12,)
    assert_equal_trees(import_weights(tmp_path, config), params)
    # A file may repeat the embedding as its head; a different head is an error.
    twice = stored | {"lm_head.weight": stored["model.embed_tokens.weight"]}
    safetensors.numpy.save_file(twice, tmp_path / "model.safetensors")
    assert_equal_trees(import_weights(tmp_path, config), params)
    twice["lm_head.weight"] = twice["lm_head.weight"] + 1
    safetensors.numpy.save_file(twice, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight.*config\.model\.tie_embeddings=False"):
        import_weights(tmp_path, config)


# --------------------------------------------------------------------------------------------------------------- files
def test_sharded_weights(tmp_path):
    _, tensors = copied("mamba2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    shards = {f"model-0000{i + 1}-of-00003.safetensors": sorted(tensors)[i::3] for i in range(3)}
    for shard, tensor_names in shards.items():
        safetensors.numpy.save_file({name: tensors[name] for name in tensor_names}, tmp_path / shard)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: shard for shard, group in shards.items() for name in group}}))
    config = config_of("mamba2")
    want = import_weights(GOLDEN / "mamba2", config)
    assert_equal_trees(import_weights(tmp_path, config), want)
    assert_equal_trees(import_weights(index, config), want)
    with pytest.raises(UserError, match=r"missing: .* \d+ more"):
        import_weights(tmp_path / next(iter(shards)), config)
    (tmp_path / next(iter(shards))).unlink()
    with pytest.raises(UserError, match=r"no file .*00001-of-00003"):
        import_weights(tmp_path, config)
    index.write_text("{}")
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json.*weight_map"):
        import_weights(tmp_path, config)


def test_index_that_disagrees_with_its_shards_is_refused(tmp_path):
    path, tensors = copied("mamba2", tmp_path)
    shard_of = dict.fromkeys([*tensors, "lm_head.more"], path.name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    with pytest.raises(UserError, match=r"index\.json .*lm_head\.more"):
        import_weights(tmp_path, config_of("mamba2"))


def test_bfloat16_import_and_export(tmp_path):
    """Import is exact; export rounds to nearest."""
    path, tensors = copied("llama", tmp_path)
    halves = {name: x.astype(jnp.bfloat16) for name, x in tensors.items()}
    safetensors.numpy.save_file(halves, path)
    config = config_of("llama")
    params = import_weights(path, config)
    w = params["blocks"]["0"]["mlp"]["up"]["w"][2]
    np.testing.assert_array_equal(w, halves["model.layers.2.mlp.up_proj.weight"].astype(np.float32).T)
    out = tmp_path / "out" / "model.safetensors"
    export_weights(import_weights(GOLDEN / "llama", config), config, out, dtype="bfloat16")
    exported = safetensors.numpy.load_file(out)
    assert all(exported[name].dtype == jnp.bfloat16 and (exported[name] == x).all() for name, x in halves.items())


def test_missing_prefix_and_redundant_tensors(tmp_path):
    """The published GPT-2 has no prefix and stores its causal mask; older Llamas store rotary frequencies."""
    path, tensors = copied("gpt2", tmp_path)
    bare = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    bare |= {"h.0.attn.bias": np.tril(np.ones((1, 1, 32, 32), np.float16))}
    safetensors.numpy.save_file(bare, path)
    config = config_of("gpt2")
    assert_equal_trees(import_weights(path, config), import_weights(GOLDEN / "gpt2", config))
    path, tensors = copied("llama", tmp_path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    safetensors.numpy.save_file(tensors, path)
    config = config_of("llama")
    assert_equal_trees(import_weights(path, config), import_weights(GOLDEN / "llama", config))
