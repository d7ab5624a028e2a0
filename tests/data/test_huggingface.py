"""Tokenizers of public models: start and end ids, bytes per id, and refused files."""

import json
import pickle
import re
import sys

import numpy as np
import pytest

from seqjax.config import DataConfig
from seqjax.data import huggingface, load_tokenizer, manifests, open_corpus
from seqjax.data.prepare import __main__ as prepare_command
from seqjax.errors import MissingPackageError, UserError
from tests import extras

from .conftest import row, write_shard

# A vocabulary as in converted sentencepiece models: U+2581 is a space, other characters are bytes.
WORDS = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{i:02X}>" for i in range(256)),
    "\u2581",
    "a",
    "b",
    "\u2581a",
    "ab",
    "\u2581ab",
    "\u00e9",
]
MERGES = [["\u2581", "a"], ["a", "b"], ["\u2581a", "b"]]


def write(directory, *, unused=0, more=(), **files):
    """Write a tokenizer.json with WORDS, and further JSON files by name.

    `unused` is a number of unused pieces; `more` are added tokens.
    """
    words = [*WORDS, *(f"<unused {i}>" for i in range(unused))]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i, "content": WORDS[i], **special} for i in range(3)]
    added += [{"id": len(words) + i, "content": text, **special, "special": False} for i, text in enumerate(more)]
    mark = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    spec = {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, mark]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece: i for i, piece in enumerate(words)},
            "merges": MERGES,
        },
    }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


# ---------------------------------------------------------------------------------- without the package tokenizers
def test_special_ids_follow_the_file_precedence(tmp_path):
    """Token texts in tokenizer files precede ids in the model's config files."""
    write(tmp_path, config={"bos_token_id": 261, "eos_token_id": 262})
    assert huggingface.special_ids(tmp_path) == (261, 262)
    write(tmp_path, generation_config={"eos_token_id": [260, 2]})
    assert huggingface.special_ids(tmp_path) == (261, 260)
    write(tmp_path, tokenizer_config={"bos_token": None, "eos_token": {"content": "</s>", "lstrip": False}})
    assert huggingface.special_ids(tmp_path) == (261, 2)
    write(tmp_path, special_tokens_map={"bos_token": "<s>", "eos_token": "<unk>"})
    assert huggingface.special_ids(tmp_path) == (1, 2)
    write(tmp_path, tokenizer_config={"eos_token": "<eos>"})
    with pytest.raises(UserError, match=r"tokenizer_config\.json: eos_token is '<eos>'"):
        huggingface.special_ids(tmp_path)


@pytest.mark.parametrize(
    "files",
    [
        {"config": {"bos_token_id": 0, "eos_token_id": 2}},
        {"generation_config": {"bos_token_id": [0, 1], "eos_token_id": 2}},
        {"tokenizer_config": {"bos_token": "<unk>", "eos_token": "</s>"}},
    ],
)
def test_start_id_0_is_valid(tmp_path, files):
    assert huggingface.special_ids(write(tmp_path, **files)) == (0, 2)


def test_hash_covers_tokenizer_and_special_ids(tmp_path):
    one = huggingface.hash_of(write(tmp_path / "a", config={"eos_token_id": 2}))
    assert huggingface.hash_of(write(tmp_path / "b", tokenizer_config={"eos_token": "</s>"}) / "tokenizer.json") == one
    assert huggingface.hash_of(write(tmp_path / "c", config={"eos_token_id": 1})) != one
    assert huggingface.hash_of(write(tmp_path / "d", more=["new"], config={"eos_token_id": 2})) != one


def test_invalid_files_are_refused_without_the_package(tmp_path, monkeypatch):
    for path in ("", tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(UserError, match=r"config\.data\.tokenizer_path=.*tokenizer\.json"):
            load_tokenizer("huggingface", path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json: model .*missing"):
        load_tokenizer("huggingface", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json is not JSON"):
        load_tokenizer("huggingface", tmp_path)
    write(tmp_path, config={"eos_token_id": 2})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingPackageError, match=r"seqjax\[hf\]"):
        load_tokenizer("huggingface", tmp_path)


# ------------------------------------------------------------------------------------------------ with tokenizers
@pytest.fixture
def tokenizers():
    return extras.package("tokenizers")


def test_unencodable_text_names_the_file(tokenizers, tmp_path):
    write(tmp_path, config={"eos_token_id": 2})
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    model = {"type": "WordLevel", "vocab": {"</s>": 2}, "unk_token": "<unk>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | {"model": model, "added_tokens": []}))
    with pytest.raises(UserError, match=r"tokenizer\.json cannot encode"):
        load_tokenizer("huggingface", tmp_path)


def test_encode_and_decode(tokenizers, tmp_path):
    tokenizer = load_tokenizer("huggingface", write(tmp_path, more=["<new>"], config={"eos_token_id": 2}))
    ids = tokenizer.encode("ab a\u00e9c")
    assert ids.dtype == np.uint16
    assert [WORDS[i] for i in ids] == ["\u2581ab", "\u2581a", "\u00e9", "<0x63>"]
    assert tokenizer.decode([2, *ids, 2, -1, 99_999]) == "ab a\u00e9c"
    assert [x.tolist() for x in tokenizer.encode_batch(["ab a\u00e9c", ""])] == [ids.tolist(), []]
    assert tokenizer.bos == tokenizer.eos == 2  # without a start token, the end token starts a text
    assert tokenizer.vocab_size == len(WORDS) + 1
    assert len(tokenizer.encode("a" * 50)) > 4  # the truncation setting of the file is ignored
    assert tokenizer.encode("a</s>").tolist()[-1] == 2  # as in transformers
    assert tokenizer.adds_space
    assert int(tokenizer.n_bytes[ids].sum()) == len(" ab a\u00e9c".encode())
    assert tokenizer.n_bytes[[0, 1, 2, len(WORDS)]].tolist() == [0, 0, 0, 5]
    assert pickle.loads(pickle.dumps(tokenizer)).encode("ab").tolist() == tokenizer.encode("ab").tolist()


def test_special_id_0_is_valid(tokenizers, tmp_path):
    start = load_tokenizer("huggingface", write(tmp_path / "a", config={"bos_token_id": 0, "eos_token_id": 2}))
    assert (start.bos, start.eos) == (0, 2)
    end = load_tokenizer("huggingface", write(tmp_path / "b", config={"bos_token_id": 1, "eos_token_id": 0}))
    assert (end.bos, end.eos) == (1, 0)
    end = load_tokenizer("huggingface", write(tmp_path / "c", config={"eos_token_id": 0}))
    assert (end.bos, end.eos) == (0, 0)


def test_special_tokens_can_be_split(tokenizers, tmp_path):
    config = {"eos_token": "</s>", "split_special_tokens": True}
    tokenizer = load_tokenizer("huggingface", write(tmp_path, tokenizer_config=config))
    assert tokenizer.decode(tokenizer.encode("a</s>")) == "a</s>"


def test_missing_end_token_is_refused(tokenizers, tmp_path):
    with pytest.raises(UserError, match="set eos_token"):
        load_tokenizer("huggingface", write(tmp_path, config={"bos_token_id": 1}))


def test_large_vocabulary_blocks_are_uint32(tokenizers, tmp_path):
    """Manifest, evaluation blocks and training batches all preserve uint32 ids."""
    directory = write(tmp_path / "model", unused=2**16, more=["<last>"], config={"eos_token_id": 2})
    tokenizer = load_tokenizer("huggingface", directory)
    assert tokenizer.encode("a<last>").tolist()[-1] == tokenizer.vocab_size - 1 > 2**16
    text = "ab \u00e9c ab<last>"
    write_shard(tmp_path / "source" / "a.jsonl.zst", [row("c4", text)] * 20)
    write_shard(tmp_path / "source" / "validation" / "a.jsonl.zst", [row("c4", text)] * 20)
    out = tmp_path / "out"
    flags = [f"--tokenizer={directory / 'tokenizer.json'}", "--seq_len=10", "--workers=1"]
    prepare_command.main([f"--source={tmp_path / 'source'}", f"--out={out}", *flags])
    manifest = manifests.read_manifest(out)
    assert manifest["dtype"] == "uint32"
    assert manifest["token_bytes"] == dict.fromkeys(("text", "by_tokens"), 40 * len(text.encode()))
    document = [2, *tokenizer.encode(text).tolist(), 2]
    expected = np.array((document * 20)[: 20 * len(document) // 11 * 11]).reshape(-1, 11)
    data = DataConfig(
        corpus="blocks",
        path=str(out),
        tokenizer="huggingface",
        tokenizer_path=str(directory),
        train_domains=("c4",),
        eval_domains=("c4",),
    )
    corpus = open_corpus(data, seq_len=10, vocab_size=70_000)
    evaluation = corpus.eval_blocks("c4", count=1000)
    assert evaluation.tokens.dtype == np.uint32
    np.testing.assert_array_equal(evaluation.tokens, expected)
    iterator = corpus.train_iterator(batch_size=len(expected))
    trained = next(iterator)["tokens"]
    iterator.close()
    np.testing.assert_array_equal(sorted(map(tuple, trained)), sorted(map(tuple, expected)))


def test_large_vocabulary_can_be_streamed(tokenizers, tmp_path):
    directory = write(tmp_path / "model", unused=2**16, more=["<last>"], config={"eos_token_id": 2})
    tokenizer = load_tokenizer("huggingface", directory)
    for split in ("train", "validation"):
        write_shard(tmp_path / "source" / split / "a.jsonl.zst", [row("c4", "a<last>b")] * 20)
    data = DataConfig(
        corpus="stream",
        path=str(tmp_path / "source"),
        tokenizer="huggingface",
        tokenizer_path=str(directory),
        train_domains=("c4",),
        eval_domains=("c4",),
    )
    corpus = open_corpus(data, seq_len=10, vocab_size=70_000)
    assert corpus.eval_blocks("c4", count=1).tokens.max() == tokenizer.vocab_size - 1
    iterator = corpus.train_iterator(batch_size=2)
    assert next(iterator)["tokens"].max() == tokenizer.vocab_size - 1
    iterator.close()


def test_byte_count_mismatch_is_reported(tokenizers, tmp_path, capsys):
    """A spelled-out special token counts 0 bytes, and the next word gets a space."""
    directory = write(tmp_path / "model", config={"eos_token_id": 2})
    write_shard(tmp_path / "source" / "a.jsonl.zst", [row("c4", "a</s>b" * 10)])
    flags = [f"--tokenizer={directory / 'tokenizer.json'}", "--seq_len=8", "--workers=1"]
    prepare_command.main([f"--source={tmp_path / 'source'}", f"--out={tmp_path / 'out'}", *flags])
    assert re.search(r"\b30 bytes.* 60 \(-50%\)", capsys.readouterr().out)


def test_panic_while_loading_names_the_file(tokenizers, tmp_path):
    """A Rust panic is not an `Exception`; here a merge gives a missing piece."""
    write(tmp_path, tokenizer_config={"eos_token": "</s>"})
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["model"] = {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(UserError, match=r"tokenizer\.json cannot .*tokenizers \("):
        huggingface.HuggingFaceTokenizer(tmp_path)


class Panic(BaseException):
    """A stand-in for pyo3's PanicException."""


@pytest.mark.parametrize("call", ["encode", "encode_batch", "decode"])
def test_panic_in_use_names_the_file(tokenizers, call, tmp_path, monkeypatch):
    write(tmp_path, tokenizer_config={"eos_token": "</s>"})
    tokenizer = huggingface.HuggingFaceTokenizer(tmp_path)

    class Broken:
        def panic(self, *args, **kwargs):
            raise Panic("E17\nstack")

        encode = encode_batch = decode = panic

    monkeypatch.setattr(tokenizer, "_tokenizer", Broken())
    with pytest.raises(UserError, match=r"tokenizer\.json .*\(E17\)"):
        getattr(tokenizer, call)({"encode": "a", "encode_batch": ["a"], "decode": [1]}[call])


@pytest.mark.parametrize("steps", [9, 3])
def test_normalizer_growth_is_limited(tokenizers, steps, tmp_path):
    """Every step replaces one letter by ten, so nine steps give 10^9 letters."""
    write(tmp_path, tokenizer_config={"eos_token": "</s>"})
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    longer = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    spec["normalizer"] = {"type": "Sequence", "normalizers": [longer] * steps}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    if steps == 9:
        with pytest.raises(UserError, match=r"tokenizer\.json: its normalizer"):
            huggingface.HuggingFaceTokenizer(tmp_path)
    else:
        assert huggingface.HuggingFaceTokenizer(tmp_path).vocab_size


@pytest.mark.parametrize("token", [["</s>"], 7, [2], {"content": 7}, {}, True])
def test_malformed_end_token_names_the_file(tokenizers, token, tmp_path):
    write(tmp_path, tokenizer_config={"eos_token": token})
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        huggingface.HuggingFaceTokenizer(tmp_path)
