"""Texts after many prompts: each ends where it is to end, in the order of the prompts, in few batches."""

import numpy as np
import pytest

from seqjax.data.tokenizer import load_tokenizer
from seqjax.decoding import Sampling
from seqjax.evals import generation
from seqjax.evals.generation import Prompt
from seqjax.models import Model
from seqjax.pretrained import Pretrained
from seqjax.sharding import make_mesh
from tests import support

BYTES = load_tokenizer("byte")
GREEDY = Sampling(temperature=0.0)


def prompt(text, until=(), n_new=12, sampling=GREEDY):
    return Prompt([BYTES.bos, *BYTES.encode(text).tolist()], until, n_new, sampling)


@pytest.fixture
def written(monkeypatch):
    """What a model writes that says `said(prompt)` and then the end of the document, and the batches it was given."""

    def write(said, prompts, *, batch_tokens=1024, **options):
        batches = []

        def tokens(params, prompt_BT, key, *, model, n_new, sampling, lengths_B, prefill_chunk, mesh):
            own = [row[:n].tolist() for row, n in zip(prompt_BT, lengths_B, strict=True)]
            batches.append([BYTES.decode(ids) for ids in own])
            rows = [[*ids, *BYTES.encode(said(BYTES.decode(ids))).tolist(), BYTES.eos] for ids in own]
            for at in range(min(lengths_B), max(lengths_B) + n_new):
                yield np.array([row[at] if at < len(row) else ord("?") for row in rows])

        monkeypatch.setattr(generation, "tokens", tokens)
        config = support.tiny("transformer_pp", model__vocab_size=BYTES.vocab_size)
        m = Pretrained(model=Model(config.model, max_len=8), params={}, config=config, step=0, mesh=make_mesh())
        m.__dict__["tokenizer"] = BYTES
        return generation.generate(m, prompts, batch_tokens=batch_tokens, seed=0, **options), batches

    return write


def test_a_text_ends_with_its_document_its_stop_string_or_its_tokens(written):
    said = {
        "a": "short",
        "bb": "one\ntwo",
        "ccc": "x, y; z",
        "dddd": "abcdefghijklmnop",
        "eeeee": "",
        "f": "ends\n\u00e9",
    }
    prompts = [
        prompt("a"),
        prompt("bb", until=("\n",)),
        prompt("ccc", until=(";", "y; z", "nothing")),
        prompt("dddd"),
        prompt("eeeee", until=("\n",)),
        prompt("f", until=("\u00e9",)),
    ]
    texts, batches = written(said.__getitem__, prompts)
    assert texts == ["short", "one", "x, y", "abcdefghijkl", "", "ends\n"]
    assert batches == [["eeeee", "dddd", "ccc", "bb", "a", "f", "eeeee", "eeeee"]], "the longest first, filled to eight"


def test_a_text_ends_when_it_is_enough(written):
    seen = []

    def enough(i, text):
        seen.append((i, text))
        return text.endswith("3")

    texts, _ = written(lambda text: f"1234{text}", [prompt("a"), prompt("bbb")], enough=enough)
    assert texts == ["123", "123"] and (1, "123") in seen and (0, "1234") not in seen


def test_who_shares_a_batch(written):
    """Equal settings, similar lengths, and at most so many tokens of caches."""
    drawn = Sampling(temperature=1.0)
    prompts = [prompt("x" * n) for n in (5, 300, 7, 45, 44)]
    prompts += [prompt("y", n_new=3), prompt("z", sampling=drawn), *(prompt(f"{i}") for i in range(9))]
    texts, batches = written(lambda text: f"<{text[:9]}>", prompts, batch_tokens=64 * 11)
    firsts = ["x" * 5, "x" * 9, "x" * 7, "x" * 9, "x" * 9, "y", "z", *map(str, range(9))]
    assert texts == [f"<{first}>"[:3] if first == "y" else f"<{first}>" for first in firsts]
    assert [len(batch) for batch in batches] == [2, 8, 4, 1, 1, 1]
    assert [sorted({*batch}, key=len)[0] for batch in batches[-3:]] == ["x" * 300, "y", "z"]
