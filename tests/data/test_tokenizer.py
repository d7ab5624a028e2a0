"""Tokenizers: round trips, ids equal to sentencepiece, and errors."""

import importlib.util
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqjax.data import tokenizer
from seqjax.data.tokenizer import ByteTokenizer, MixtralTokenizer, load_tokenizer
from seqjax.errors import UserError
from tests import extras

needs_mixtral = extras.mark("sentencepiece", "mistral_common")

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
SPACED = st.lists(st.sampled_from(["  ", " ", "\n", "\t", "\r", "the", "Ab", "9", "\u2581", "é", "中", "<s>", "."]))


@given(TEXT)
def test_byte_tokenizer_round_trips(text: str):
    byte = ByteTokenizer()
    ids = byte.encode(text)
    assert ids.dtype == np.uint16
    assert byte.decode([byte.bos, *ids, byte.eos]) == text
    assert [i.tolist() for i in byte.encode_batch([text, "a"])] == [ids.tolist(), [97]]


def test_byte_tokenizer_decodes_invalid_ids():
    assert ByteTokenizer().decode([0xC3, 300, -1, 97]) == "\ufffda"


def test_byte_hash_is_stable():
    assert load_tokenizer("byte").hash[:16] == "d8b6eeb213e55327"  # manifests contain it


def test_id_dtype_depends_on_vocab_size():
    assert [tokenizer.id_dtype(size).str for size in (2**16, 2**16 + 1)] == ["<u2", "<u4"]


@needs_mixtral
class TestMixtral:
    def test_published_ids(self):
        mixtral = load_tokenizer("mixtral")
        assert (mixtral.vocab_size, mixtral.bos, mixtral.eos) == (32_000, 1, 2)
        assert mixtral.hash == tokenizer.MIXTRAL_SHA256
        assert mixtral.encode("Hello  world").tolist() == [22557, 28705, 1526]
        assert mixtral.decode([22557, 32_000, -1, 28705, 1526]) == "Hello  world", "unknown ids are dropped"

    @settings(deadline=None, max_examples=300)
    @given(st.one_of(TEXT, SPACED.map("".join)))
    def test_word_cache_equals_sentencepiece(self, text: str):
        mixtral = load_tokenizer("mixtral")
        assert isinstance(mixtral, MixtralTokenizer)
        assert mixtral._words is not None
        ids = mixtral.encode(text)
        assert ids.tolist() == mixtral._sp.encode(text)
        if "\u2581" not in text:
            assert mixtral.decode([mixtral.bos, *ids, mixtral.eos]) == text

    def test_full_word_cache_keeps_the_ids(self, monkeypatch: pytest.MonkeyPatch):
        text = " ".join(f"word{i} word{i % 3}" for i in range(200))
        expected = load_tokenizer("mixtral").encode(text)
        monkeypatch.setattr(tokenizer, "MAX_WORDS", 16)
        small = MixtralTokenizer()
        np.testing.assert_array_equal(small.encode(text), expected)
        assert small._words is not None
        assert len(small._words) <= 16

    def test_pickle_omits_the_word_cache(self):
        mixtral = load_tokenizer("mixtral")
        mixtral.encode("a b c d e f")
        copy = pickle.loads(pickle.dumps(mixtral))
        assert copy.encode("a new text").tolist() == mixtral.encode("a new text").tolist()

    def test_unsuitable_model_has_no_word_cache(self, tmp_path: Path):
        import sentencepiece

        corpus = tmp_path / "text"
        corpus.write_text("the cat sat on the mat and the cat ate the rat\n" * 50)
        sentencepiece.SentencePieceTrainer.train(
            input=str(corpus),
            model_prefix=str(tmp_path / "m"),
            vocab_size=60,
            split_by_whitespace=False,
            model_type="bpe",
        )
        model = load_tokenizer("mixtral", str(tmp_path / "m.model"))
        assert isinstance(model, MixtralTokenizer)
        assert model._words is None
        assert model.encode("the cat sat").tolist() == model._sp.encode("the cat sat")
        assert model.hash != tokenizer.MIXTRAL_SHA256

    def test_n_bytes_of_another_model_equal_the_text(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        """For pieces, byte-fallback ids and a vocabulary that needs uint32."""
        import sentencepiece

        (tmp_path / "text").write_text("the cat sat on the mat and the caf\u00e9 ate  the rat\n" * 50)
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "text"),
            model_prefix=str(tmp_path / "m"),
            vocab_size=300,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            model_type="bpe",
        )
        model = MixtralTokenizer(str(tmp_path / "m.model"))
        text = "the  caf\u00e9\n\t\u4e2d\u6587 \U0001f600 sat "
        ids = model.encode(text)
        assert int(model.n_bytes[ids].sum()) - model.adds_space == len(text.encode())
        monkeypatch.setattr(tokenizer, "id_dtype", lambda vocab_size: np.dtype("<u4"))
        large = MixtralTokenizer(str(tmp_path / "m.model"))
        assert large.encode(text).dtype == np.uint32
        assert large.encode(text).tolist() == ids.tolist()

    def test_special_id_0_is_valid_and_missing_bos_is_refused(self, tmp_path: Path):
        import sentencepiece

        (tmp_path / "text").write_text("the cat sat on the mat and the cat ate the rat\n" * 50)
        options = {"input": str(tmp_path / "text"), "vocab_size": 30, "model_type": "bpe", "unk_id": 2}
        for name, ids in (("start", {"bos_id": 0, "eos_id": 1}), ("end", {"bos_id": 1, "eos_id": 0})):
            sentencepiece.SentencePieceTrainer.train(model_prefix=str(tmp_path / name), **options, **ids)
            made = MixtralTokenizer(str(tmp_path / f"{name}.model"))
            assert {"bos_id": made.bos, "eos_id": made.eos} == ids
            ids_of_text = made.encode("the cat")
            assert tokenizer.with_specials(made, ids_of_text).tolist() == [made.bos, *ids_of_text, made.eos]
            assert made.decode([made.bos, *ids_of_text, made.eos]) == "the cat" and made.n_bytes[0] == 0
        sentencepiece.SentencePieceTrainer.train(model_prefix=str(tmp_path / "none"), bos_id=-1, eos_id=1, **options)
        with pytest.raises(UserError, match=r"bos -1 .*eos 1"):
            MixtralTokenizer(str(tmp_path / "none.model"))

    def test_invalid_model_file_is_refused(self, tmp_path: Path):
        with pytest.raises(UserError, match=r"config\.data\.tokenizer_path: no file .*absent"):
            MixtralTokenizer(str(tmp_path / "absent"))
        (tmp_path / "m").write_text("no model")
        with pytest.raises(UserError, match=r"/m .*not .*sentencepiece"):
            MixtralTokenizer(str(tmp_path / "m"))

    def test_changed_shipped_model_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        (tmp_path / "m").write_text("no model")
        monkeypatch.setattr(tokenizer, "_shipped_model", lambda: tmp_path / "m")
        with pytest.raises(UserError, match=r"Mixtral vocabulary .*mistral-common"):
            MixtralTokenizer()

    def test_missing_mistral_common_names_the_extra(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"pip install 'seqjax\[mixtral\]'"):
            MixtralTokenizer()


def test_missing_sentencepiece_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UserError, match=r"pip install 'seqjax\[mixtral\]'"):
        MixtralTokenizer()


def test_invalid_tokenizer_settings_are_refused():
    with pytest.raises(UserError, match=r"config\.data\.tokenizer='mistral' .*'mixtral'"):
        load_tokenizer("mistral")
    with pytest.raises(UserError, match=r"config\.data\.tokenizer_path"):
        load_tokenizer("byte", "some.model")
