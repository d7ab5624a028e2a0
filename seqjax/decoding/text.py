"""Streamed text from a model: only whole characters, and nothing that a stop string may still remove."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jax.sharding import Mesh

from seqjax.data.tokenizer import Tokenizer
from seqjax.decoding.decode import PREFILL_CHUNK, Timing, tokens
from seqjax.decoding.sampling import Sampling
from seqjax.errors import UserError
from seqjax.models import Model
from seqjax.types import Params, PRNGKey

_INVALID = "\ufffd"  # the decoding of bytes that are not, or not yet, a character


def encode(tokenizer: Tokenizer, text: str, *, vocab_size: int, name: str = "text") -> np.ndarray:
    """Return the ids of `text`, int [n].

    Raises `UserError` for an id beyond the model's `vocab_size`, and `TypeError`, with the `name` of the argument, for
    anything but text.
    """
    if not isinstance(text, str):
        shape = f" of the shape {text.shape}" if hasattr(text, "shape") else ""
        raise TypeError(f"{name} is {type(text).__name__}{shape} instead of str; seqjax.Model takes tokens.")
    ids = tokenizer.encode(text)
    if len(ids) and ids.max() >= vocab_size:
        raise UserError(
            f"The {tokenizer.name} tokenizer gives the id {ids.max()}, and the model has {vocab_size}: it is not the "
            "model's own (config.data.tokenizer)."
        )
    return ids


class TextDecoder:
    """Turns tokens into text, one at a time.

    Together, the parts that `push` and `flush` return equal the text of decoding all tokens at once after those of
    `context`. Bytes of an incomplete character are held back, and so is a space that the tokenizer decodes only with
    its successor.
    """

    def __init__(self, tokenizer: Tokenizer, context: Iterable[int] = ()):
        """Begin after the tokens of `context`, e.g. a prompt: the first word after it then keeps its space."""
        self._decode = tokenizer.decode
        # Tokens whose text has been returned. Some are decoded again with what follows, because decoding drops the
        # space before the first word.
        self._context = [int(i) for i in context]
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that is certain with one more token; it may be empty."""
        self._pending.append(int(token))
        text = self._decode([*self._context, *self._pending])
        if text.endswith(_INVALID) or len(text) == len(self._context_text):
            return ""
        new = text[len(self._context_text) :]
        self._context, self._pending = self._pending, []
        self._context_text = self._decode(self._context)
        return new

    def flush(self) -> str:
        """Return the rest, at the end: bytes that never became a character are U+FFFD."""
        return self._decode([*self._context, *self._pending])[len(self._context_text) :]


class StopStrings:
    """Ends a text before the first of some strings that is complete in it, wherever its parts are divided.

    If several strings are complete at the same character, the longest counts.
    """

    def __init__(self, strings: str | Sequence[str] = ()):
        """Raise `UserError` for an empty string, before which every text would end."""
        self._strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if "" in self._strings:
            raise UserError("stop: an empty string is in every text; give at least one character.")
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Return the text so far before any stop string; a possible beginning of a stop string is held back."""
        if self.found:
            return ""
        text = self._held + text
        ends = [(at + len(s), at) for s in self._strings if (at := text.find(s)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        longest = min(len(text), max(map(len, self._strings), default=1) - 1)
        n_held = next(
            (n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._strings)),
            0,
        )
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """Return the text held back, at the end."""
        rest, self._held = self._held, ""
        return rest


def stream(
    model: Model,
    params: Params,
    tokenizer: Tokenizer,
    prompt: str,
    key: PRNGKey,
    *,
    n_new: int,
    sampling: Sampling | None = None,
    stop: str | Sequence[str] = (),
    prefill_chunk: int = PREFILL_CHUNK,
    mesh: Mesh | None = None,
    timing: Timing | None = None,
) -> Iterator[str]:
    """Return an iterator over the parts of the continuation of a prompt, as they are decoded.

    It ends with the document, before a `stop` string, or after `n_new` tokens. A part is never empty and holds only
    whole characters that no stop string can still remove. `decoding.tokens` describes the other arguments.

    Raises `UserError` for invalid arguments.
    """
    if n_new < 1:
        raise UserError(f"max_new_tokens must be at least 1, not {n_new}.")
    if prefill_chunk < 0:
        raise UserError(f"prefill_chunk must be at least 0, not {prefill_chunk}; 0 feeds the prompt in one piece.")
    sampling = Sampling() if sampling is None else sampling
    sampling.check(vocab_size=model.config.vocab_size)
    stops = StopStrings(stop)
    prompt_ids = encode(tokenizer, prompt, vocab_size=model.config.vocab_size, name="prompt")
    new = tokens(
        params,
        np.concatenate([[tokenizer.bos], prompt_ids]).astype(np.int32)[None],
        key,
        model=model,
        n_new=n_new,
        sampling=sampling,
        prefill_chunk=prefill_chunk,
        mesh=mesh,
        timing=timing,
    )
    return _parts(new, tokenizer.eos, TextDecoder(tokenizer, prompt_ids.tolist()), stops)


def _parts(new: Iterator[np.ndarray], eos: int, decoder: TextDecoder, stops: StopStrings) -> Iterator[str]:
    for token in (int(token_B[0]) for token_B in new):
        if token == eos:
            break
        part = stops.push(decoder.push(token))
        if part:
            yield part
        if stops.found:
            return
    part = stops.push(decoder.flush()) + stops.flush()
    if part:
        yield part
