"""Streamed text: complete characters, the same text as decoding at once, and nothing after a stop string."""

import inspect
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqjax.data.tokenizer import ByteTokenizer, load_tokenizer
from seqjax.decoding import StopStrings, TextDecoder
from seqjax.decoding.text import encode
from seqjax.errors import UserError
from tests import extras

needs_mixtral = extras.mark("sentencepiece", "mistral_common")

TEXT = st.text(st.sampled_from("aé中\U0001f600 \n\ufffd"), max_size=12)


def parts_of(tokenizer, ids, context=()) -> list[str]:
    decoder = TextDecoder(tokenizer, context)
    return [decoder.push(i) for i in ids] + [decoder.flush()]


def test_characters_are_complete():
    parts = parts_of(ByteTokenizer(), "aé中\U0001f600.".encode())
    assert parts == ["a", "", "é", "", "", "中", "", "", "", "\U0001f600", ".", ""]


def test_invalid_bytes_come_with_the_next_character_or_at_the_end():
    byte = ByteTokenizer()
    assert parts_of(byte, [0xE4, 0xB8, ord("b")]) == ["", "", "\ufffdb", ""]
    assert parts_of(byte, [ord("b"), 0xE4, 0xB8]) == ["b", "", "", "\ufffd"]
    assert parts_of(byte, [byte.bos, 97, byte.eos]) == ["", "a", "", ""]  # special tokens have no text


@given(TEXT, st.lists(st.integers(0, 259), max_size=12))
def test_streamed_bytes_equal_decoding_at_once(context, ids):
    byte = ByteTokenizer()
    before = byte.encode(context).tolist()
    assert context + "".join(parts_of(byte, ids, before)) == byte.decode([*before, *ids])


@needs_mixtral
class TestMixtral:
    def test_words_keep_their_space_except_at_the_start(self):
        mixtral = load_tokenizer("mixtral")
        once, upon = mixtral.encode("Once").tolist(), mixtral.encode("upon a").tolist()
        assert parts_of(mixtral, [*once, *upon]) == ["Once", " upon", " a", ""]
        assert parts_of(mixtral, upon, once) == [" upon", " a", ""]

    def test_characters_with_several_pieces_are_complete(self):
        mixtral = load_tokenizer("mixtral")
        ids = mixtral.encode("\U0001f9ff!").tolist()
        parts = parts_of(mixtral, ids)
        assert "".join(parts) == "\U0001f9ff!"
        assert "\ufffd" not in "".join(parts)
        assert len([part for part in parts if part]) < len(ids)  # some piece is only part of a character

    @settings(deadline=None, max_examples=100)
    @given(TEXT, st.lists(st.one_of(st.integers(0, 300), st.integers(28_000, 31_999)), max_size=12))
    def test_streamed_pieces_equal_decoding_at_once(self, context, ids):
        mixtral = load_tokenizer("mixtral")
        before = mixtral.encode(context).tolist()
        full_text = mixtral.decode([*before, *ids])
        assert mixtral.decode(before) + "".join(parts_of(mixtral, ids, before)) == full_text


def test_ids_beyond_the_vocabulary_are_refused():
    """The bytes of "abc" are 97 to 99."""
    assert encode(ByteTokenizer(), "abc", vocab_size=100).tolist() == [97, 98, 99]
    with pytest.raises(UserError, match=r"id 99\b.* 99 .*config\.data\.tokenizer"):
        encode(ByteTokenizer(), "abc", vocab_size=99)
    assert encode(ByteTokenizer(), "", vocab_size=1).size == 0


# --------------------------------------------------------------------------------------------------------------- stops
def stopped(parts, stops) -> tuple[list[str], bool]:
    stop_strings = StopStrings(stops)
    out = [stop_strings.push(part) for part in parts]
    return [*out, stop_strings.flush()], stop_strings.matched


def test_text_ends_before_a_stop_string_that_spans_parts():
    assert stopped(["ab", "c\n", "\nEN", "D", "x"], "\n\nEND") == (["ab", "c", "", "", "", ""], True)
    assert stopped(["a\n\nb"], ["\n\n"]) == (["a", ""], True)


def test_possible_start_of_a_stop_string_is_held_back():
    assert stopped(["aE", "N", "d", "E"], ["END"]) == (["a", "", "ENd", "", "E"], False)
    assert stopped(["aa", "ab", "aab"], ["aab!"]) == (["", "a", "aab", "aab"], False)


def test_text_passes_without_stop_strings():
    assert stopped(["a", "", "b"], ()) == (["a", "", "b", ""], False)


def test_empty_stop_string_is_refused():
    with pytest.raises(UserError, match=r"^stop: .*empty"):
        StopStrings(["a", ""])


def first_stop(text: str, stops: list[str]) -> str:
    """Return the text before the first complete stop string, the longest one of a tie, letter by letter."""
    for end in range(len(text) + 1):
        matches = [s for s in stops if text[:end].endswith(s)]
        if matches:
            return text[: end - max(map(len, matches))]
    return text


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 12), max_size=4),
)
def test_result_does_not_depend_on_the_division(text, stops, cuts):
    edges = np.clip(sorted([0, *cuts, len(text)]), 0, len(text))
    parts = [text[a:b] for a, b in itertools.pairwise(edges)]
    out, matches = stopped(parts, stops)
    assert "".join(out) == first_stop(text, stops)
    assert matches == any(s in text for s in stops)
    shown = ""
    for part in out[:-1]:  # text is never taken back
        shown += part
        assert first_stop(text, stops).startswith(shown)


def test_non_text_error_is_one_line():
    for value, type_text in (
        (np.zeros((1, 3), np.int32), r"ndarray of the shape \(1, 3\)"),
        (b"abc", "bytes"),
        (None, "None"),
    ):
        with pytest.raises(TypeError, match=rf"^prompt is {type_text}[^\n]*str[^\n]*$"):
            inspect.unwrap(encode)(ByteTokenizer(), value, vocab_size=264, name="prompt")
