"""`seqjax niah`: prompts, scoring of answers, and the command."""

import hashlib
import json
import random

import numpy as np
import pytest

from seqjax.data.tokenizer import load_tokenizer
from seqjax.errors import UserError
from seqjax.evals import generation, niah
from seqjax.models import Model
from seqjax.pretrained import Pretrained
from seqjax.sharding import make_mesh
from tests import extras, support

BYTES = load_tokenizer("byte")
WORDS = ["brave-otter", "calm-lake", "dry-hill", "early-morning-train"]


@pytest.fixture
def few_words(monkeypatch):
    """Replace the word list of wonderwords, which has six million entries."""
    monkeypatch.setattr(niah, "_words", lambda: WORDS)


def drawn(*lengths: int, n: int = 5, seed: int = 0) -> list[niah.Sample]:
    rng = random.Random(seed)
    return [s for length in lengths for s in niah.samples(len, length=length, n=n, rng=rng)]


@pytest.mark.parametrize("length", [600, 4096, 20_000])
def test_prompt_has_one_number_and_fills_its_length(few_words, length) -> None:
    for sample in drawn(length):
        question = sample.prompt.rpartition(" The special magic number")[0]
        assert sample.prompt.count(sample.value) == 1
        assert length - 25 * len(niah.LINE + "\n") - 100 < len(question) + niah.NEW_TOKENS <= length
        key = sample.prompt.rpartition(" number for ")[2].partition(" ")[0]
        assert f"numbers for {key} is: {sample.value}.\n" in sample.prompt and key in WORDS
        assert question.endswith(f"What is the special magic number for {key} mentioned in the provided text?")


def test_samples_depend_on_seed_and_earlier_lengths(few_words) -> None:
    assert drawn(600, 1000) == drawn(600, 1000) != drawn(600, 1000, seed=1)
    assert drawn(600) == drawn(600, 1000)[:5]
    assert drawn(1000) != drawn(600, 1000)[5:]  # the first length advances the random generator


def test_number_is_anywhere_in_the_text(few_words) -> None:
    positions = [s.prompt.index(s.value) / len(s.prompt) for s in drawn(4000, n=40)]
    assert min(positions) < 0.3 and max(positions) > 0.7


def test_too_short_length_is_refused(few_words) -> None:
    with pytest.raises(ValueError, match=r"^200 tokens"):
        drawn(200)


@pytest.mark.slow
def test_samples_equal_the_harness() -> None:
    # The hash is from a comparison with lm-evaluation-harness 0.4.13 at its seed 0, with bytes and the Mixtral
    # vocabulary, at 512 to 102,400 tokens.
    extras.need("wonderwords")
    text = "".join(s.prompt + s.value for s in drawn(512, 1024, n=20))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "8b75c215b0cb028f"


def answered(monkeypatch, answer_for, samples, *, batch_size=2) -> tuple[float, list[tuple[int, ...]]]:
    """Return the accuracy of a stub model that writes `answer_for(prompt)`, and its batch shapes."""
    shapes = []

    def tokens(params, prompt_BT, key, *, n_new, sampling, lengths_B, **settings):
        shapes.append(prompt_BT.shape)
        assert (prompt_BT[:, 0] == BYTES.bos).all() and sampling.temperature == 0
        prompts = [row[:n].tolist() for row, n in zip(prompt_BT, lengths_B, strict=True)]
        texts = [[*ids, *BYTES.encode(answer_for(BYTES.decode(ids[1:]))).tolist(), BYTES.eos] for ids in prompts]
        for i in range(min(lengths_B), max(lengths_B) + n_new):
            yield np.array([text[i] if i < len(text) else ord("x") for text in texts])

    monkeypatch.setattr(generation, "tokens", tokens)
    config = support.tiny("transformer_pp", model__vocab_size=BYTES.vocab_size)
    m = Pretrained(model=Model(config.model, max_len=8), params={}, config=config, step=0, mesh=make_mesh())
    m.__dict__["tokenizer"] = BYTES
    return niah.accuracy(m, samples, batch_size=batch_size, prefill_chunk=0), shapes


def test_answer_must_contain_the_number_within_the_limit(few_words, monkeypatch) -> None:
    samples = drawn(600, n=7)
    value_of = {s.prompt: s.value for s in samples}
    assert answered(monkeypatch, lambda p: f": {value_of[p]}.", samples)[0] == 1
    assert answered(monkeypatch, lambda p: f": {value_of[p][:-1]}", samples)[0] == 0
    assert answered(monkeypatch, lambda p: "x" * 200 + value_of[p], samples)[0] == 0  # beyond the 128 tokens
    first = samples[0].prompt
    assert answered(monkeypatch, lambda p: value_of[p] if p == first else "no", samples)[0] == pytest.approx(1 / 7)


def test_prompts_share_batches(few_words, monkeypatch) -> None:
    samples = drawn(600, n=9)
    assert len({len(sample.prompt) for sample in samples}) > 1
    _, shapes = answered(monkeypatch, lambda p: "no", samples, batch_size=4)
    assert [rows for rows, _ in shapes] == [4, 4, 1]
    assert shapes[0][1] == 1 + max(len(sample.prompt) for sample in samples)


@pytest.mark.parametrize("lengths", ["", "4k", "0", "-5", "1,x"])
def test_bad_lengths_are_refused(lengths) -> None:
    with pytest.raises(UserError, match=f"^--lengths={lengths}:"):
        niah.main(["--workdir=runs/none", f"--lengths={lengths}"])


@pytest.fixture
def command(few_words, tmp_path, capsys) -> list[str]:
    """Train two steps and return the arguments for two lengths."""
    from seqjax.commands import train

    settings = ["train.steps=2", "eval.tokens=128", "log.sample_tokens=0", "train.batch_size=8"]
    train.main(["--config=rwkv7:debug", f"--workdir={tmp_path}", *(f"--config.{s}" for s in settings)])
    capsys.readouterr()
    return [f"--workdir={tmp_path}", "--lengths=600,700", "--samples=3", "--batch_size=2"]


@pytest.mark.slow
def test_command_on_a_run(command, tmp_path, capsys) -> None:
    niah.main(command)
    out = capsys.readouterr().out
    assert "600    0.00%  of 3" in out and "700    0.00%  of 3" in out  # after two training steps
    saved = json.loads((tmp_path / "niah.json").read_text())
    result = {"accuracy": 0.0, "samples": 3}
    assert len(saved.pop("parameters_sha256")) == 64
    settings = {"step": 2, "seed": 0, "samples": 3, "asked": [600, 700]}
    assert saved == settings | {"lengths": {"600": result, "700": result}}


@pytest.mark.slow
def test_same_command_resumes_with_missing_lengths(command, capsys, monkeypatch) -> None:
    scored: list[tuple[str, ...]] = []

    def interrupted(m, samples, **settings) -> float:
        scored.append(tuple(sample.value for sample in samples))
        if len(scored) == 2:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(niah, "accuracy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        niah.main(command)
    niah.main(command)
    assert scored[1] == scored[2]  # the second length has the same samples after resuming
    assert len(scored) == 3 and "600  100.00%" in capsys.readouterr().out
    niah.main(command)
    assert len(scored) == 3  # nothing was missing
    niah.main([*command, "--again"])
    niah.main([*command[:1], "--lengths=700", *command[2:]])
    assert len(scored) == 6 and scored[5] != scored[4]  # samples depend on the list of lengths
