"""Streamed text from a model: whole characters that no stop string can remove."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jax.sharding import Mesh

from seqjax.data.tokenizer import Tokenizer
from seqjax.decoding.decode import PREFILL_CHUNK, Timing, tokens
from seqjax.decoding.sampling import Sampling
from seqjax.errors import UserError
from seqjax.models import Model
from seqjax.types import Params, PRNGKey

_INVALID = "\ufffd"  # bytes that are not, or not yet, a character


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
            f"The {tokenizer.name} tokenizer gives the id {ids.max()}, and the model has {vocab_size} ids: use the "
            "model's tokenizer (config.data.tokenizer)."
        )
    return ids


class TextDecoder:
    """Turns tokens into text, one at a time.

    The concatenated results of `push` and `flush` equal the text that all tokens give when decoded at once after
    `context`. Bytes of an incomplete character are held back, and so is a space that the tokenizer decodes only
    together with the next token.
    """

    def __init__(self, tokenizer: Tokenizer, context: Iterable[int] = ()):
        """Begin after the tokens of `context`, e.g. a prompt.

        The first word after it then keeps its space.
        """
        self._decode = tokenizer.decode
        # Tokens with returned text. Some are decoded again with the next tokens, because decoding drops the space
        # before the first word.
        self._context = [int(i) for i in context]
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that one more token makes certain; it may be empty."""
        self._pending.append(int(token))
        text = self._decode([*self._context, *self._pending])
        if text.endswith(_INVALID) or len(text) == len(self._context_text):
            return ""
        new = text[len(self._context_text) :]
        self._context, self._pending = self._pending, []
        self._context_text = self._decode(self._context)
        return new

    def flush(self) -> str:
        """Return the rest at the end of the text; incomplete characters become U+FFFD."""
        return self._decode([*self._context, *self._pending])[len(self._context_text) :]


class StopStrings:
    """Ends a text before its first complete stop string, however the text is divided.

    If several strings are complete at the same character, the longest counts.
    """

    def __init__(self, strings: str | Sequence[str] = ()):
        """Raise `UserError` for an empty string, which would end every text."""
        self._strings = (strings,) if isinstance(strings, str) else tuple(strings)
        if "" in self._strings:
            raise UserError("stop: an empty string is in every text; give at least one character.")
        self._held = ""
        self.matched = False  # whether a stop string has ended the text

    def push(self, text: str) -> str:
        """Return the text before any stop string, as far as it is certain.

        A possible beginning of a stop string is held back.
        """
        if self.matched:
            return ""
        text = self._held + text
        ends = [(at + len(s), at) for s in self._strings if (at := text.find(s)) >= 0]
        if ends:
            self.matched, self._held = True, ""
            return text[: min(ends)[1]]
        longest = min(len(text), max(map(len, self._strings), default=1) - 1)
        n_held = next(
            (n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._strings)),
            0,
        )
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]

    def flush(self) -> str:
        """Return the text that is still held back, at the end."""
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
    """Return an iterator over the parts of a prompt's continuation.

    Parts are yielded as they are decoded. The text ends with the document, before a `stop` string, or after `n_new`
    tokens. A part is never empty and holds only whole characters that no stop string can still remove.
    `decoding.tokens` describes the other arguments.

    Raises `UserError` for invalid arguments.
    """
    if n_new < 1:
        raise UserError(f"max_new_tokens must be at least 1, not {n_new}.")
    if prefill_chunk < 0:
        raise UserError(f"prefill_chunk must be at least 0, not {prefill_chunk}; 0 prefills the prompt in one piece.")
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
        if stops.matched:
            return
    part = stops.push(decoder.flush()) + stops.flush()
    if part:
        yield part
