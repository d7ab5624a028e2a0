"""Untrusted public directories: text in a file never becomes a setting, and no number in it exhausts memory."""

import json
import re
import shutil
import sys

import pytest

import seqjax
from seqjax import reading
from seqjax.config import from_config_dict, presets
from seqjax.convert import directory, files, public_config, tokenizer_files
from seqjax.data import huggingface
from seqjax.errors import UserError
from tests.convert.cases import CASES, GOLDEN, copied
from tests.data.test_huggingface import write as write_tokenizer

EVIL = "evil_module.mixer"
TEXTS = ("16,model.mixer.name=" + EVIL, f"{{'name': '{EVIL}'}}", {"name": EVIL}, [EVIL], "16", True)
NUMBERS = (0, -1, 1 << 31, 10**400, 1.5, float("inf"))


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """Put a module that must not be imported on the path; return its directory."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / f"{EVIL.partition('.')[0]}.py").write_text("raise AssertionError('it ran')")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    yield tmp_path
    assert EVIL.partition(".")[0] not in sys.modules


def setting_keys(family):
    """Return the config.json keys that determine our settings."""
    hf_config = json.loads((GOLDEN / family / "config.json").read_text())
    described = directory.described(GOLDEN / family)
    (matched,) = [f for group in directory.FAMILIES.values() for f in group if hf_config["model_type"] in f.types]
    assert described.config.model.n_layers
    return sorted({setting.public for setting in matched.settings if setting.form is not None} & hf_config.keys())


@pytest.mark.parametrize("family", CASES)
def test_values_never_become_other_settings(family, evil):
    for key in setting_keys(family):
        for value in (*TEXTS, *NUMBERS):
            copied(family, evil / "model", with_config=True, **{key: value})
            try:
                described = directory.described(evil / "model")
            except UserError:
                continue
            # The value is allowed for this key: every setting is a number, a boolean or a name from seqjax.
            assert all(EVIL not in str(setting) for setting in described.overrides.values()), (key, value)


@pytest.mark.parametrize("key", ["hidden_size", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "model_type"])
def test_value_that_names_code_is_refused_by_its_key(key, evil):
    copied("llama", evil / "model", with_config=True, **{key: TEXTS[0]})
    with pytest.raises(UserError, match=key):
        seqjax.load(evil / "model")


def test_rope_group_with_wrong_types_is_refused(evil):
    for group in ({"factor": TEXTS[0]}, {"factor": [2]}, {"rope_type": ["llama3"]}, {"rope_theta": "1e4"}):
        copied("llama3", evil / "model", with_config=True, rope_parameters={"rope_type": "linear", **group})
        with pytest.raises(UserError, match=r"rope_parameters\."):
            seqjax.load(evil / "model")


@pytest.mark.parametrize("family", CASES)
def test_described_config_equals_its_config_argument(family):
    described = directory.described(GOLDEN / family)
    assert described.config == from_config_dict(presets.read_config(described.argument))


def test_too_many_layers_are_refused(tmp_path):
    """Listing a billion missing tensor names would exhaust memory."""
    copied("llama", tmp_path, with_config=True, num_hidden_layers=9_999)
    with pytest.raises(UserError, match=r"30 tensors.*config\.model\.n_layers=9,999"):
        directory.load(tmp_path)
    copied("llama", tmp_path, with_config=True, num_hidden_layers=10**9)
    with pytest.raises(UserError, match="num_hidden_layers is 1000000000"):
        directory.load(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../a.safetensors", "/a.safetensors", "*", "a.bin", "a/b.safetensors", "\x1b.safetensors"]
)
def test_index_refuses_files_outside_its_directory(shard, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(UserError, match=rf"index\.json names .*{re.escape(repr(shard))}") as caught:
        files.weight_map(index)
    assert str(caught.value).isprintable()


def test_header_longer_than_the_file_is_refused(tmp_path):
    path, _ = copied("llama", tmp_path, with_config=True)
    content = path.read_bytes()
    for length in (1 << 62, files.MOST_HEADER + 1, len(content) + 1):
        path.write_bytes(length.to_bytes(8, "little") + content[8:])
        with pytest.raises(UserError, match=r"model\.safetensors .*header"):
            directory.load(tmp_path)


@pytest.mark.parametrize("value", [["byte"], "byte", 1, {"tokenizer": ["byte"]}, {"sha256": 1}], ids=str)
def test_malformed_seqjax_entry_is_ignored(value, tmp_path):
    write_tokenizer(tmp_path, tokenizer_config={"seqjax": value})
    assert tokenizer_files.find(tmp_path) == (huggingface.HuggingFaceTokenizer.name, str(tmp_path))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 4_000_000_000}}}),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": "0"}}}),
        ("tokenizer.json", {"model": {"type": "Unigram", "vocab": [["a", 0.0], "b"]}}),
        ("tokenizer.json", {"added_tokens": [{"id": 4_000_000_000, "content": "a"}]}),
        ("tokenizer.json", {"added_tokens": [{"id": 1}]}),
        ("tokenizer_config.json", {"bos_token": ["<s>"]}),
        ("tokenizer_config.json", {"eos_token": {"text": "</s>"}}),
        ("generation_config.json", {"bos_token_id": -1}),
        ("generation_config.json", {"eos_token_id": 10**30}),
        ("generation_config.json", {"eos_token_id": True}),
    ],
    ids=str,
)
def test_malformed_tokenizer_is_refused_by_its_file(file, change, tmp_path):
    write_tokenizer(tmp_path)
    if file == "generation_config.json":  # read only if tokenizer_config.json has no special tokens
        (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
    content = json.loads((tmp_path / file).read_text()) if (tmp_path / file).is_file() else {}
    (tmp_path / file).write_text(json.dumps(content | change))
    with pytest.raises(UserError, match=file):
        huggingface.special_ids(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_oversized_tokenizer_is_refused(name, tmp_path):
    with (tmp_path / name).open("wb") as file:
        file.truncate(reading.MOST_JSON + 1)
    read = {
        "tokenizer.json": lambda: tokenizer_files.find(tmp_path),
        "tokenizer.model": lambda: tokenizer_files.copy(tmp_path, tmp_path / "copy"),
    }
    with pytest.raises(UserError, match=f"{name}.* 64"):
        read[name]()


def test_config_json_directory_is_not_a_model(tmp_path):
    shutil.copytree(GOLDEN / "llama", tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "model" / "config.json").mkdir()
    assert public_config.read(tmp_path / "model" / "config.json") is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", "linear"),
        ("rope_scaling", ["linear"]),
        ("rope_scaling", {"rope_type": ["linear"]}),
        ("rope_parameters", 7),
        ("model_type", ["llama"]),
        ("model_type", {}),
        ("hidden_size", 2**62),
        ("num_hidden_layers", "2"),
    ],
)
def test_wrong_type_error_is_one_line(key, value, tmp_path):
    copied("llama", tmp_path, with_config=True, **{key: value})
    with pytest.raises(UserError, match=r"config\.json") as caught:
        directory.described(tmp_path)
    assert "\n" not in str(caught.value)
