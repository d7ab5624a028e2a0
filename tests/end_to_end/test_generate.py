"""`python -m seqjax.generate`: every flag, compared with the parallel form on growing prefixes.

The model adds a learned vector per position, so decoding at a wrong position gives other tokens.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import seqjax
from seqjax.commands import generate
from seqjax.data.tokenizer import load_tokenizer
from seqjax.errors import UserError
from seqjax.training import evaluate
from tests import extras, support
from tests.end_to_end.conftest import Run, write_checkpoint
from tests.support import random_params as params_of

PROMPT = "qwerty "
N_NEW = 20  # 28 of the model's 32 positions, with BOS and the prompt


class Continuation:
    """Expected continuations of the newest checkpoint, from full forward passes over a row padded at its end."""

    def __init__(self, run: Run):
        config, model, params, _, _ = evaluate.restore(run.workdir)
        self.params, self.length = jax.device_get(params), config.train.seq_len
        self._logits = jax.jit(model.logits)
        self._tokenizer = load_tokenizer(config.data.tokenizer)

    def __call__(
        self,
        *,
        temperature: float,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        shift: int = 0,
        prompt: str = PROMPT,
    ) -> str:
        """Return the continuation; `shift` moves the position vectors after the prompt, as a wrong position would."""
        tokenizer = self._tokenizer
        params = dict(self.params)
        ids = [tokenizer.bos, *map(int, tokenizer.encode(prompt))]
        n_prompt = len(ids)
        if shift:
            positions = np.array(params["positions"])
            positions[n_prompt:] = np.roll(positions, shift, axis=0)[n_prompt:]
            params["positions"] = positions
        for key in jax.random.split(jax.random.key(seed), N_NEW):
            row = jnp.asarray([ids + [0] * (self.length - len(ids))])
            scores = np.asarray(self._logits(params, row))[0, len(ids) - 1].astype(np.float64)
            if temperature:  # Gumbel sampling: the argmax of logits / temperature + noise
                if top_k:
                    scores[np.argsort(scores)[:-top_k]] = -np.inf
                scores = scores / temperature
                order = np.argsort(-scores)
                p = np.exp(scores[order] - scores.max())
                scores[order[1 + np.searchsorted(np.cumsum(p / p.sum()), top_p) :]] = -np.inf
                scores = scores + np.asarray(jax.random.gumbel(key, (1, len(scores))))[0]
            below, best = np.sort(scores)[-2:]
            assert best - below > 1e-4, "a tie: either token would be right"
            ids.append(int(np.argmax(scores)))
        new = ids[n_prompt:]
        new = new[: new.index(tokenizer.eos)] if tokenizer.eos in new else new
        # decoded after the prompt, so a following word keeps its space
        return tokenizer.decode([*ids[:n_prompt], *new])[len(prompt) :]


@pytest.fixture(scope="module")
def continuation(rough: Run) -> Continuation:
    return Continuation(rough)


def command(run: Run, capsys, **flags) -> str:
    capsys.readouterr()
    values = {"workdir": run.workdir, "prompt": PROMPT, "max_new_tokens": N_NEW} | flags
    generate.main([f"--{name}={value}" for name, value in values.items()])
    return capsys.readouterr().out


def test_tokens_are_decoded_at_their_own_positions(rough: Run, continuation: Continuation, capsys):
    want = continuation(temperature=0.0)
    assert continuation(temperature=0.0, shift=1) != want
    assert continuation(temperature=0.0, shift=-1) != want
    assert command(rough, capsys, temperature=0) == f"{PROMPT}{want}\n"


@pytest.mark.parametrize(
    ("flags", "neighbour"),
    [
        ({"temperature": 0.4}, {"temperature": 1.0}),
        pytest.param({"temperature": 2.5}, {"temperature": 1.0}, marks=pytest.mark.slow),
        ({"temperature": 1.0, "seed": 7}, {"temperature": 1.0}),
        ({"temperature": 1.0, "top_k": 3}, {"temperature": 1.0}),
        ({"temperature": 1.0, "top_p": 0.5}, {"temperature": 1.0}),
    ],
    ids=str,
)
def test_sampling_follows_the_flags(rough: Run, continuation: Continuation, capsys, flags, neighbour):
    want = continuation(**flags)
    assert want != continuation(**neighbour), "the flag makes no difference here"
    assert command(rough, capsys, **flags) == f"{PROMPT}{want}\n"


def test_the_help_shows_the_defaults(rough: Run, continuation: Continuation, capsys):
    want = continuation(temperature=0.8, prompt="The ")
    assert want != continuation(temperature=1.0, prompt="The ")
    assert command(rough, capsys, prompt="The ") == f"The {want}\n"


def test_a_prompt_can_be_prefilled_in_pieces(rough: Run, continuation: Continuation, capsys):
    """By default eight prompt tokens are decoded in steps; here in two pieces and steps, at their positions."""
    want = f"{PROMPT}{continuation(temperature=0.0)}\n"
    assert command(rough, capsys, temperature=0, prefill_chunk=3) == want


def test_text_ends_before_a_stop_string(rough: Run, continuation: Continuation, capsys):
    want = continuation(temperature=0.0)
    first, second = re.findall(r"[\0-\x7f]{2}", want)[:2]  # each of two tokens
    assert 0 < want.find(first) < want.find(second)
    for stops in ([first], [second, first], ["no such text", first]):
        capsys.readouterr()
        flags = [f"--stop={stop}" for stop in stops]
        argv = [f"--workdir={rough.workdir}", f"--prompt={PROMPT}", f"--max_new_tokens={N_NEW}", "--temperature=0"]
        generate.main([*argv, *flags])
        assert capsys.readouterr().out == f"{PROMPT}{want[: want.find(first)]}\n"


def test_prompts_from_a_file_are_independent(rough: Run, continuation: Continuation, capsys, tmp_path):
    flags = {"temperature": 1.0, "seed": 7}
    wants = [f"{prompt}{continuation(prompt=prompt, **flags)}\n" for prompt in (PROMPT, "a: b")]
    shown = f"--- prompt 1 of 2\n{wants[0]}--- prompt 2 of 2\n{wants[1]}"
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\n\na: b\n")
    (tmp_path / "prompts.jsonl").write_text(f'{{"prompt": "{PROMPT}"}}\n{{"id": 3, "prompt": "a: b"}}\n')
    for name in ("prompts.txt", "prompts.jsonl"):
        capsys.readouterr()
        argv = [f"--workdir={rough.workdir}", f"--max_new_tokens={N_NEW}", "--temperature=1", "--seed=7"]
        generate.main([*argv, f"--prompts={tmp_path / name}"])
        assert capsys.readouterr().out == shown


def test_a_file_without_prompts_is_refused(tmp_path):
    bad = {
        "empty.txt": ("\n \n", r"empty\.txt .*no prompt"),
        "a.jsonl": (
            '{"prompt": "a"}\n{"text": "b"}\n',
            r'a\.jsonl, line 2: prompt .*missing; .*\{"prompt": "\.\.\."\}',
        ),
        "b.jsonl": ("just text\n", r"b\.jsonl, line 1 .*JSON"),
        "c.jsonl": ('{"prompt": 3}\n', r"c\.jsonl, line 1: prompt is 3, "),
    }
    for name, (content, message) in bad.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=message):
            generate.main(["--workdir=unused", f"--prompts={tmp_path / name}"])
    (tmp_path / "d.txt").write_bytes(b"a\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        generate.main(["--workdir=unused", f"--prompts={tmp_path / 'd.txt'}"])
    with pytest.raises(UserError, match=r"e\.txt: no such"):
        generate.main(["--workdir=unused", f"--prompts={tmp_path / 'e.txt'}"])
    with pytest.raises(UserError, match="--prompt and --prompts: "):
        generate.main(["--workdir=unused", "--prompt=a", "--prompts=b"])


def test_text_is_streamed_and_the_speed_is_a_separate_line(rough: Run, continuation: Continuation, capsys, monkeypatch):
    want, writes = continuation(temperature=0.0), []
    methods = {"write": lambda _, text: writes.append(text), "flush": lambda _: writes.append(None)}
    shown = type("Shown", (), methods | {"isatty": lambda _: False})()
    with monkeypatch.context() as patch:
        patch.setattr(generate.sys, "stdout", shown)
        argv = [f"--workdir={rough.workdir}", f"--prompt={PROMPT}", f"--max_new_tokens={N_NEW}", "--temperature=0"]
        generate.main(argv)
    parts = re.findall("\ufffd*[^\ufffd]", want)  # one per byte; bytes of an incomplete character wait
    assert len(parts) > 5
    assert writes[0::2] == [PROMPT, *parts, "\n"]
    assert set(writes[1::2]) == {None}, "each is flushed"
    first, speed, *_ = capsys.readouterr().err.split("\n")
    assert first.startswith("compiling ")
    assert re.fullmatch(
        rf"prefill 8 tokens, [\d,]+ tokens/s; decode {N_NEW} tokens, [\d,]+ tokens/s( \(without compiling, .* s\))?",
        speed,
    )


def test_python_takes_the_same_arguments(rough: Run, continuation: Continuation):
    """Checked on a mesh of 2 x 2 x 2 devices; another prompt compiles nothing."""
    m = seqjax.load(rough.workdir)
    flags = {"temperature": 1.0, "top_p": 0.5, "seed": 2}
    want = continuation(**flags)
    assert m.generate(PROMPT, max_new_tokens=N_NEW, **flags) == want
    events = []
    listen = lambda event, seconds, **labels: events.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        parts = list(m.stream(PROMPT, max_new_tokens=N_NEW, **flags))
        assert "".join(parts) == want
        assert len(parts) > 1
        assert m.generate("ab", max_new_tokens=5, stop="\n\n", **flags)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in events if event.startswith("/jax/core/compile/")]
    assert m.generate(PROMPT, max_new_tokens=N_NEW, stop=(want[7:9],), **flags) == want[: want.find(want[7:9])]
    for bad in ({"top_p": 0.0}, {"stop": ""}, {"max_new_tokens": 0}, {"prefill_chunk": -1}):
        with pytest.raises(UserError, match=rf"^{next(iter(bad))}"):
            m.stream(PROMPT, **bad)  # all at once


def test_weights_with_nan_are_an_error(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(support, "random_params", lambda model: jax.tree.map(lambda x: x * np.nan, params_of(model)))
    run = write_checkpoint(tmp_path / "run", config, 1)
    with pytest.raises(UserError, match=r"logits .*NaN"):
        command(run, capsys, temperature=0)
    assert capsys.readouterr().out == PROMPT
    with pytest.raises(UserError, match=r"logits .*NaN"):
        seqjax.load(run.workdir).generate(PROMPT, max_new_tokens=3)


def test_a_terminal_gets_no_control_characters(rough: Run, capsys, monkeypatch):
    """A file gets the text unchanged."""
    monkeypatch.setattr(generate, "stream", lambda *args, **options: iter(["a\x1b[2J", "\x00b\n"]))
    assert command(rough, capsys, prompt="\x9b") == "\x9ba\x1b[2J\x00b\n\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert command(rough, capsys, prompt="\x9b") == "\\x9ba\\x1b[2J\\x00b\n\n"


@extras.mark("sentencepiece", "mistral_common")
def test_generation_uses_the_run_tokenizer(config, tmp_path, capsys):
    values = {
        "model": dataclasses.replace(config.model, vocab_size=32_000),
        "data": dataclasses.replace(config.data, tokenizer="mixtral"),
    }
    run = write_checkpoint(tmp_path / "run", dataclasses.replace(config, **values), 1)
    want = Continuation(run)(temperature=0.0)
    assert command(run, capsys, temperature=0) == f"{PROMPT}{want}\n"
