"""Public directories (settings, weights, tokenizer) through the commands and `seqjax.load`.

test_transformers.py compares them with transformers.
"""

import dataclasses
import json
import shlex
import shutil
import sys
import types

import jax
import numpy as np
import pytest
import safetensors.numpy

import seqjax
from seqjax import pretrained
from seqjax.commands import cli
from seqjax.config import from_config_dict, presets, to_dict
from seqjax.convert import __main__ as command
from seqjax.convert import directory, export_weights, import_weights, public_config, tokenizer_files
from seqjax.convert.directory import fetched
from seqjax.data import load_tokenizer
from seqjax.data.builtin import extract
from seqjax.errors import UserError
from seqjax.models import Model
from seqjax.nn.params import fingerprint
from seqjax.training import workdir as workdirs
from tests import extras
from tests.convert.cases import CASES, GOLDEN, config_of, copied
from tests.data.test_tokenizer import needs_mixtral


def suggested(out: str) -> list[list[str]]:
    """Return the commands that `import` printed, split into words."""
    return [shlex.split(line) for line in out.splitlines() if line.startswith("  seqjax ")]


def read_json(path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Export the tiny Llama with the byte tokenizer as a public directory."""
    out = tmp_path_factory.mktemp("exported") / "llama"
    config = config_of("llama")
    directory.export(import_weights(GOLDEN / "llama", config), config, out)
    return out


# -------------------------------------------------------------------------------------------------------------- config
@pytest.mark.parametrize("family", CASES)
def test_described_config_equals_our_config(family):
    config = from_config_dict(presets.read_config(directory.described(GOLDEN / family).argument))
    want = config_of(family)
    computed = {"head_dim": 6, "key_dim": 32, "value_dim": 48 if family == "gated_deltanet" else 32}
    got, want = to_dict(config)["model"], to_dict(want)["model"]
    for key, value in computed.items():  # explicit in a config.json, None in ours
        if key in want["mixer"] and want["mixer"][key] is None and got["mixer"][key] is not None:
            assert got["mixer"].pop(key) == value
            del want["mixer"][key]
    assert got == want
    hf_config = read_json(GOLDEN / family / "config.json")
    max_len = hf_config.get("n_positions") or hf_config.get("max_position_embeddings")
    assert max_len is None or config.train.seq_len == max_len


@pytest.mark.parametrize(
    ("family", "changes", "match"),
    [
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4}}, "rope_scaling is 'yarn'"),
        ("llama3", {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2}}, "g is 'dynamic'"),
        ("qwen3", {"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_scaling is 'longrope'"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "layer_types": None},
         "sliding_window is '9 in 1 of 2 layers'"),
        ("qwen3", {"layer_types": ["chunked_attention", "full_attention"]}, "is 'None in 1 of 2 layers'"),
        ("llama", {"rope_parameters": {"rope_theta": 5e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ("llama", {"rope_parameters": {"full": {"rope_theta": 5e4}}}, "rope_theta is 'one base per layer type'"),
        ("llama", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("mamba", {"use_bias": True}, "use_bias is True"),
        ("mamba2", {"n_groups": 2}, "n_groups is 2"),
        ("deltanet", {"attn": {"layers": [1]}}, "attn is {'layers'"),
        ("gated_deltanet", {"num_v_heads": 4}, "num_v_heads is 4"),
    ],
)  # fmt: skip
def test_load_refuses_unsupported_features(family, changes, match, tmp_path):
    copied(family, tmp_path, with_config=True, **changes)
    with pytest.raises(UserError, match=f"{match}.*{public_config.UNSUPPORTED}"):
        seqjax.load(tmp_path)


def test_incomplete_directories_are_refused(tmp_path):
    copied("llama", tmp_path, with_config=True, hidden_size=None)
    with pytest.raises(UserError, match=r"no hidden_size.*--config"):
        directory.load(tmp_path)
    copied("llama", tmp_path, with_config=True, model_type="qwen3_moe")
    with pytest.raises(UserError, match=r"model_type='qwen3_moe'.*delta_net, .*llama"):
        directory.load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"no .*config\.json .*model_type; give --config"):
        command.main(["import", f"--weights={tmp_path}", f"--workdir={tmp_path / 'run'}"])
    with pytest.raises(UserError, match=r"no config\.json\b.*--workdir"):
        seqjax.load(tmp_path)
    with pytest.raises(UserError, match=r"--weights: .*nowhere.*hf://OWNER/NAME"):
        command.main(["import", "--weights=nowhere", f"--workdir={tmp_path / 'run'}"])


def test_run_commands_suggest_import_for_a_public_model():
    with pytest.raises(UserError, match=r"`seqjax convert import --weights="):
        workdirs.load_config(GOLDEN / "llama")


def test_missing_sizes_default_to_the_public_class(tmp_path):
    copied("mamba", tmp_path, with_config=True, state_size=None, time_step_rank="auto", expand=None)
    argument = directory.described(tmp_path).argument
    assert "model.mixer.state" not in argument  # 16 in both
    assert "model.mixer.dt_rank=1" in argument
    assert "model.mixer.expand" not in argument
    copied("rwkv7", tmp_path, with_config=True, v_low_rank_dim=None)
    assert "model.mixer.value_rank=16" in directory.described(tmp_path).argument


@pytest.mark.parametrize("length", ["rope_scaling", "original_max_position_embeddings", "max_position_embeddings"])
def test_scaled_rope_under_older_names(length, tmp_path):
    """`rope_scaling` with `type`, `rope_theta` outside it, and the original length at each supported place."""
    rope = {"type": "llama3", "factor": 4, "low_freq_factor": 0.25, "high_freq_factor": 1}
    changes = {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": rope}
    if length == "rope_scaling":
        rope["original_max_position_embeddings"] = 16
    else:
        changes[length] = 16
    copied("llama3", tmp_path, with_config=True, **changes)
    got, want = (
        from_config_dict(presets.read_config(directory.described(d).argument)) for d in (tmp_path, GOLDEN / "llama3")
    )
    assert got.model == want.model
    del rope["factor"]
    copied("llama3", tmp_path, with_config=True, **changes)
    with pytest.raises(UserError, match=r"config\.json has no 'factor'.*rope_scaling"):
        seqjax.load(tmp_path)


def test_qwen_window(tmp_path):
    """From `max_window_layers` or, since transformers 5, `layer_types`; none without `use_sliding_window`."""
    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0, "layer_types": None}
    for changes, want in (
        (window, 5),
        (window | {"max_window_layers": 2, "layer_types": ["sliding_attention"] * 2}, 5),
        (window | {"max_window_layers": 2}, None),
        (window | {"use_sliding_window": False}, None),
        (window | {"sliding_window": None}, None),
    ):
        copied("qwen3", tmp_path, with_config=True, **changes)
        config = from_config_dict(presets.read_config(directory.described(tmp_path).argument))
        assert config.model.mixer.window == want, changes
    export_weights(import_weights(GOLDEN / "qwen3", config), config, tmp_path / "out" / "model.safetensors")
    assert read_json(tmp_path / "out" / "config.json")["use_sliding_window"] is False


# ------------------------------------------------------------------------------------------------------------- weights
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_weights_are_refused(bad, tmp_path):
    path, tensors = copied("llama", tmp_path, with_config=True)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = bad
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight in .* 1 of 960 .*NaN"):
        seqjax.load(tmp_path)
    config = config_of("llama")
    params = import_weights(GOLDEN / "llama", config)
    params["blocks"]["0"]["mlp"]["up"]["w"][1, 4, 3] = bad
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight .*checkpoint: 1 of 960"):
        export_weights(params, config, tmp_path / "out" / "model.safetensors")


def test_pickled_weights_are_refused(tmp_path):
    shutil.copy(GOLDEN / "llama" / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: .*\.safetensors"):
        seqjax.load(tmp_path)


# ------------------------------------------------------------------------------------------------- load, import, export
def test_load_gives_the_public_logits(exported):
    m = seqjax.load(exported)
    assert (m.step, m.config.data.tokenizer, m.tokenizer.bos) == (0, "byte", 256)
    io = np.load(GOLDEN / "llama" / "io.npz")
    got = np.asarray(jax.jit(m.model.logits)(m.params, io["tokens"]))
    np.testing.assert_allclose(got, io["logits"], rtol=0, atol=2e-5 * np.abs(io["logits"]).max())
    assert 4 < m.loss("Once upon") < 12


def test_missing_tokenizer_is_not_replaced(tmp_path, capsys):
    m = seqjax.load(GOLDEN / "llama")
    with pytest.raises(UserError, match=r"golden/convert/llama'.* no tokenizer\.json"):
        m.loss("Once upon")
    shutil.copytree(GOLDEN / "rwkv7", tmp_path / "rwkv7")
    (tmp_path / "rwkv7" / "hf_rwkv_tokenizer.py").write_text("raise SystemExit")
    with pytest.raises(UserError, match=r"hf_rwkv_tokenizer\.py"):
        seqjax.load(tmp_path / "rwkv7").loss("Once upon")
    command.main(["import", f"--weights={GOLDEN / 'llama'}", f"--workdir={tmp_path / 'run'}"])
    out = capsys.readouterr().out
    assert ": transformer_pp:debug,mo" in out
    assert not suggested(out)  # Without a tokenizer, neither `generate` nor `train` is suggested.
    export = ["export", f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"]
    with pytest.raises(UserError, match=r"no tokenizer .*--weights_only"):
        command.main(export)
    command.main([*export, "--weights_only"])
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    hf_config = read_json(tmp_path / "out" / "config.json")
    assert {hf_config[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")} == {None}  # not the class defaults


def test_ids_beyond_the_vocabulary_are_refused():
    """JAX would clamp the index and give the loss for a different text."""
    m = seqjax.load(GOLDEN / "gpt2")
    m.__dict__["tokenizer"] = load_tokenizer("byte")  # the model has 48 ids
    for call in (m.loss, m.generate):
        with pytest.raises(UserError, match=r"id 110\b.* 48\b"):
            call("Once")


def test_import_without_config_and_export_round_trip(exported, tmp_path, capsys):
    args = ["import", f"--weights={exported}", f"--workdir={tmp_path / 'run'}"]
    command.main(args)
    out = capsys.readouterr().out
    assert "Llama, 26,664 parameters, step 0; tokenizer byte." in out
    assert [words[1] for words in suggested(out)] == ["generate", "train"]
    command.main(["export", f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'again'}"])
    names = sorted(p.name for p in exported.iterdir())
    assert names == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        tokenizer_files.CONFIG,
    ]
    for name in names:
        if name.startswith(("tokenizer", "generation")):
            assert (tmp_path / "again" / name).read_bytes() == (exported / name).read_bytes(), name
    want = safetensors.numpy.load_file(exported / "model.safetensors")
    got = safetensors.numpy.load_file(tmp_path / "again" / "model.safetensors")
    assert got.keys() == want.keys()
    assert all((got[name] == x).all() for name, x in want.items())
    old, new = read_json(exported / "config.json"), read_json(tmp_path / "again" / "config.json")
    assert {key for key in old | new if old.get(key) != new.get(key)} == set()
    assert (new["bos_token_id"], new["eos_token_id"], new["vocab_size"]) == (256, 257, 264)
    with pytest.raises(UserError, match=r"/run holds .*--workdir"):
        command.main(args)


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["byte", "huggingface"])
def test_commands_printed_by_import_run_in_any_directory(exported, tokenizer, tmp_path, monkeypatch, capsys):
    """The printed commands, plus settings for a small run, work after the model was moved away.

    The run uses a twentieth of the built-in corpus, which it has to tokenize.
    """
    files = extract._files
    monkeypatch.setattr(extract, "_files", lambda dists: list(files(dists))[::20])
    if tokenizer == "huggingface":  # an edited tokenizer, which is copied into the workdir
        extras.need("tokenizers")
    shutil.copytree(exported, tmp_path / "a model")
    if tokenizer == "huggingface":
        (tmp_path / "a model" / tokenizer_files.CONFIG).unlink()
    monkeypatch.chdir(tmp_path)
    command.main(["import", "--weights=a model", "--workdir=my runs/imported"])
    generate, train = suggested(capsys.readouterr().out)
    shutil.rmtree(tmp_path / "a model")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    cli.run([*generate[1:], "--max_new_tokens=2"])
    small = {"train.steps": 1, "train.batch_size": 8, "train.seq_len": 32, "data.cache_dir": tmp_path / "corpus"}
    small |= {"optim.lr": 0, "optim.warmup_steps": 1, "eval.tokens": 64, "eval.classes": False}
    small |= {"log.sample_tokens": 0, "log.tensorboard": False}
    cli.run([*train[1:], *(f"--config.{key}={value}" for key, value in small.items())])
    (run,) = (tmp_path / "elsewhere" / "runs").iterdir()
    assert workdirs.load_config(run).data.tokenizer == tokenizer
    before, after = (seqjax.load(path).params for path in (tmp_path / "my runs" / "imported", run))
    assert fingerprint(before) == fingerprint(after)


def test_init_from_a_public_directory(exported):
    """`--init_from` gives the same parameters as `load`, with the run's sharding."""
    m, config = seqjax.load(exported), config_of("llama", data__tokenizer="byte")
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), m.params)
    params, step = pretrained.weights_of(str(exported)).read(config, target)
    assert (step, fingerprint(params)) == (0, fingerprint(m.params))
    assert jax.tree.map(lambda x: x.sharding, params) == jax.tree.map(lambda x: x.sharding, m.params)
    assert pretrained.describe_weights(str(exported), config) == f"from the public model {exported}"
    other = config_of("llama", model__n_layers=2)
    for read in (pretrained.describe_weights, lambda path, of: pretrained.weights_of(path).read(of, target)):
        with pytest.raises(UserError, match=r"--config.*num_hidden_layers is 3"):
            read(str(exported), other)


def test_export_does_not_overwrite_other_files(exported, tmp_path):
    config = config_of("llama")
    params = import_weights(GOLDEN / "llama", config)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json exists"):
        directory.export(params, config, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.json"]
    directory.export(params, config, exported, dtype="float32")  # equal content may be written again
    with pytest.raises(UserError, match=r"config\.json exists"):
        directory.export(params, config, exported, dtype="float16")
    gpt2 = config_of("gpt2")
    too_small = dataclasses.replace(gpt2, model=dataclasses.replace(gpt2.model, vocab_size=257))
    with pytest.raises(UserError, match=r" 258 .*config\.model\.vocab_size=257.*--weights_only"):
        directory.export(import_weights(GOLDEN / "gpt2", gpt2), too_small, tmp_path / "gpt2")


# ----------------------------------------------------------------------------------------------------------- tokenizers
def test_qwen2_export_refuses_our_tokenizers(tmp_path):
    """`AutoTokenizer` would add Qwen2's normalizer (NFC)."""
    config = config_of("qwen2", model__vocab_size=264)
    with pytest.raises(UserError, match=r"Qwen2.*byte tokenizer.*--weights_only"):
        directory.export({}, config, tmp_path)
    assert not list(tmp_path.iterdir())


def test_exported_byte_tokenizer(exported):
    """256 characters without merges; a text starts with bos, like training documents."""
    spec = read_json(exported / "tokenizer.json")
    assert len(spec["model"]["vocab"]) == 258
    assert spec["model"]["vocab"]["A"] == 65
    assert spec["model"]["vocab"]["Ġ"] == 32  # a space in GPT-2's alphabet
    assert {token["content"]: token["id"] for token in spec["added_tokens"]} == {"<|bos|>": 256, "<|eos|>": 257}
    assert spec["post_processor"]["special_tokens"]["<|bos|>"]["ids"] == [256]
    assert tokenizer_files.find(exported) == ("byte", "")


def test_edited_tokenizer_is_read_as_huggingface(exported, tmp_path):
    shutil.copytree(exported, tmp_path / "edited")
    file = tmp_path / "edited" / "tokenizer.json"
    file.write_text(file.read_text().replace("<|eos|>", "<|end|>"))
    assert tokenizer_files.find(tmp_path / "edited") == ("huggingface", str(tmp_path / "edited"))


@needs_mixtral
def test_exported_mixtral_tokenizer(tmp_path):
    """The merges implied by sentencepiece's scores; test_transformers.py compares the ids."""
    files = tokenizer_files.files_of(config_of("llama", data__tokenizer="mixtral").data, max_length=None)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    spec = read_json(tmp_path / "tokenizer.json")
    mixtral = load_tokenizer("mixtral")
    assert len(spec["model"]["vocab"]) == mixtral.vocab_size
    # Every merge gives a piece; the first merge gives the piece with the highest score.
    assert all(left + right in spec["model"]["vocab"] for left, right in spec["model"]["merges"])
    assert spec["model"]["merges"][0] == ["\u2581", "t"]
    assert spec["model"]["vocab"]["\u2581t"] == 261
    assert read_json(tmp_path / "generation_config.json") == {"bos_token_id": 1, "eos_token_id": 2}
    assert tokenizer_files.find(tmp_path) == ("mixtral", "")


@needs_mixtral
def test_import_copies_a_sentencepiece_model(tmp_path):
    """The copy in the workdir is still found after the workdir was moved."""
    import mistral_common

    shutil.copytree(GOLDEN / "llama", tmp_path / "llama")
    shutil.copy(
        f"{mistral_common.__path__[0]}/data/tokenizer.model.v1", tmp_path / "llama" / tokenizer_files.SENTENCEPIECE
    )
    command.main(["import", f"--weights={tmp_path / 'llama'}", f"--workdir={tmp_path / 'run'}"])
    shutil.rmtree(tmp_path / "llama")
    (tmp_path / "run").rename(tmp_path / "moved")
    data = workdirs.load_config(tmp_path / "moved").data
    assert (data.tokenizer, data.tokenizer_path) == (
        "mixtral",
        str(tmp_path / "moved" / "tokenizer" / "tokenizer.model"),
    )
    assert load_tokenizer(data.tokenizer, data.tokenizer_path).encode("Hello").tolist() == [22557]
    (tmp_path / "moved" / "tokenizer" / "added_tokens.json").write_text("{}")
    with pytest.raises(UserError, match=r"added_tokens\.json .*tokenizer\.model"):
        tokenizer_files.find(tmp_path / "moved" / "tokenizer")


# ----------------------------------------------------------------------------------------------------------------- hub
def hub_stub(monkeypatch, root, calls):
    """Replace `huggingface_hub` by a stub with one repository, golden Mamba; `calls` records its calls."""

    def snapshot_download(name, *, revision, allow_patterns):
        calls.append((name, revision, allow_patterns))
        if name != "owner/mamba":
            raise LookupError(f"404: no repository {name}\nmore lines")
        commit = root / "0123abc"
        commit.mkdir(exist_ok=True)
        for file in (GOLDEN / "mamba").iterdir():
            if file.name in allow_patterns:
                shutil.copy(file, commit)
        return str(commit)

    stub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", stub)


def test_load_from_the_hub(tmp_path, monkeypatch):
    calls = []
    hub_stub(monkeypatch, tmp_path, calls)
    m = seqjax.load("hf://owner/mamba@v1")
    assert m.config.model.mixer.name == "mamba1"
    assert [(name, revision) for name, revision, _ in calls] == [("owner/mamba", "v1"), ("owner/mamba", "0123abc")]
    assert "config.json" in calls[0][2]
    assert calls[1][2] == ["model.safetensors"]
    command.main(["import", "--weights=hf://owner/mamba", f"--workdir={tmp_path / 'run'}"])
    assert seqjax.load(tmp_path / "run").step == 0
    with pytest.raises(UserError, match=r"hf://owner/other .*\(LookupError: 404: no .*owner/other\)"):
        fetched("hf://owner/other")
    with pytest.raises(UserError, match=r"hf://a/b/c .*hf://OWNER/NAME@REVISION"):
        fetched("hf://a/b/c")
    assert fetched("owner/mamba").parts == ("owner", "mamba")  # a path, even if the hub has such a model
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"huggingface_hub: pip install 'seqjax\[hf\]'"):
        fetched("hf://owner/mamba")


def test_only_indexed_shards_are_fetched(tmp_path, monkeypatch):
    calls = []
    hub_stub(monkeypatch, tmp_path, calls)
    (tmp_path / "0123abc").mkdir()
    index = {"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-1.safetensors"}}
    (tmp_path / "0123abc" / "model.safetensors.index.json").write_text(json.dumps(index))
    fetched("hf://owner/mamba")
    assert calls[1][2] == ["model-1.safetensors", "model-2.safetensors"]


def test_loaded_params_use_the_mesh(exported):
    m = seqjax.load(exported)
    assert isinstance(m.model, Model)
    for x in jax.tree.leaves(m.params):
        assert x.sharding.mesh == m.mesh
