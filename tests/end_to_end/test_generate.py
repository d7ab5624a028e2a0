"""`python -m seqjax.generate`: every flag, against the parallel form on prefixes that grow.

The model adds a learned vector per position, so a token that is decoded at its neighbour's comes out as another.
"""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax import evaluate, generate
from seqjax.data.tokenizer import load_tokenizer
from tests.end_to_end.conftest import Run, write_checkpoint

PROMPT = "qwerty "
N_NEW = 20  # with BOS and prompt 28 of the 32 positions that the model has


class Continuation:
    """What the newest checkpoint goes on with, from full forward passes over a row that is padded at its end."""

    def __init__(self, run: Run):
        config, model, params, _, _ = evaluate.restore(run.workdir)
        self.params, self.length = jax.device_get(params), config.train.seq_len
        self._logits = jax.jit(model.logits)
        self._tokenizer = load_tokenizer(config.data.tokenizer)

    def __call__(
        self, *, temperature: float, top_k: int = 0, seed: int = 0, shift: int = 0, prompt: str = PROMPT
    ) -> str:
        """`shift` moves the vectors of the positions after the prompt: what a wrong position would give."""
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
            if temperature:  # drawing by Gumbel's trick: the largest of logits / temperature + noise
                if top_k:
                    scores[np.argsort(scores)[:-top_k]] = -np.inf
                scores = scores / temperature + np.asarray(jax.random.gumbel(key, (1, len(scores))))[0]
            below, best = np.sort(scores)[-2:]
            assert best - below > 1e-4, "a tie: either token would be right"
            ids.append(int(np.argmax(scores)))
        new = ids[n_prompt:]
        return tokenizer.decode(new[: new.index(tokenizer.eos)] if tokenizer.eos in new else new)


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
        ({"temperature": 2.5}, {"temperature": 1.0}),
        ({"temperature": 1.0, "seed": 7}, {"temperature": 1.0}),
        ({"temperature": 1.0, "top_k": 3}, {"temperature": 1.0}),
    ],
    ids=str,
)
def test_sampling_is_as_the_flags_say(rough: Run, continuation: Continuation, capsys, flags, neighbour):
    want = continuation(**flags)
    assert want != continuation(**neighbour), "the flag makes no difference here"
    assert command(rough, capsys, **flags) == f"{PROMPT}{want}\n"


def test_the_defaults_are_those_of_the_help(rough: Run, continuation: Continuation, capsys):
    want = continuation(temperature=0.8, prompt="The ")
    assert want != continuation(temperature=1.0, prompt="The ")
    assert command(rough, capsys, prompt="The ") == f"The {want}\n"


absent = [name for name in ("sentencepiece", "mistral_common") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(absent), reason=f"needs {absent}: pip install 'seqjax[mixtral]'")
def test_the_tokenizer_is_that_of_the_run(config, tmp_path, capsys):
    values = {
        "model": dataclasses.replace(config.model, vocab_size=32_000),
        "data": dataclasses.replace(config.data, tokenizer="mixtral"),
    }
    run = write_checkpoint(tmp_path / "run", dataclasses.replace(config, **values), 1)
    want = Continuation(run)(temperature=0.0)
    assert command(run, capsys, temperature=0) == f"{PROMPT}{want}\n"
