"""Continuations of many prompts: ends, order and batching."""

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
def generated(monkeypatch):
    """Return a function: the texts of a stub model that writes `text_for(prompt)` and EOS, and its batches."""

    def generate(text_for, prompts, *, batch_tokens=1024, **options):
        batches = []

        def tokens(params, prompt_BT, key, *, model, n_new, sampling, lengths_B, prefill_chunk, mesh):
            prompt_ids = [row[:n].tolist() for row, n in zip(prompt_BT, lengths_B, strict=True)]
            batches.append([BYTES.decode(ids) for ids in prompt_ids])
            rows = [[*ids, *BYTES.encode(text_for(BYTES.decode(ids))).tolist(), BYTES.eos] for ids in prompt_ids]
            for at in range(min(lengths_B), max(lengths_B) + n_new):
                yield np.array([row[at] if at < len(row) else ord("?") for row in rows])

        monkeypatch.setattr(generation, "tokens", tokens)
        config = support.tiny("transformer_pp", model__vocab_size=BYTES.vocab_size)
        m = Pretrained(model=Model(config.model, max_len=8), params={}, config=config, step=0, mesh=make_mesh())
        m.__dict__["tokenizer"] = BYTES
        return generation.generate(m, prompts, batch_tokens=batch_tokens, seed=0, **options), batches

    return generate


def test_text_ends_at_eos_stop_string_or_token_limit(generated):
    text_for = {
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
    texts, batches = generated(text_for.__getitem__, prompts)
    assert texts == ["short", "one", "x, y", "abcdefghijkl", "", "ends\n"]
    # Longest first, filled to eight rows.
    assert batches == [["eeeee", "dddd", "ccc", "bb", "a", "f", "eeeee", "eeeee"]]


def test_enough_stops_a_text(generated):
    seen = []

    def enough(i, text):
        seen.append((i, text))
        return text.endswith("3")

    texts, _ = generated(lambda text: f"1234{text}", [prompt("a"), prompt("bbb")], enough=enough)
    assert texts == ["123", "123"] and (1, "123") in seen and (0, "1234") not in seen


def test_batches_have_equal_settings_and_similar_lengths(generated):
    """`batch_tokens` limits the cache tokens of a batch."""
    sampled = Sampling(temperature=1.0)
    prompts = [prompt("x" * n) for n in (5, 300, 7, 45, 44)]
    prompts += [prompt("y", n_new=3), prompt("z", sampling=sampled), *(prompt(f"{i}") for i in range(9))]
    texts, batches = generated(lambda text: f"<{text[:9]}>", prompts, batch_tokens=64 * 11)
    firsts = ["x" * 5, "x" * 9, "x" * 7, "x" * 9, "x" * 9, "y", "z", *map(str, range(9))]
    assert texts == [f"<{first}>"[:3] if first == "y" else f"<{first}>" for first in firsts]
    assert [len(batch) for batch in batches] == [2, 8, 4, 1, 1, 1]
    assert [sorted({*batch}, key=len)[0] for batch in batches[-3:]] == ["x" * 300, "y", "z"]
