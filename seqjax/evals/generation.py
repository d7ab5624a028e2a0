"""Generate continuations of many prompts by cached decoding, batch by batch.

Prompts of similar length share a batch without padding (`decoding.tokens`). A continuation ends at EOS, before its
first stop string, or after its maximum number of tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from seqjax.data.tokenizer import Tokenizer
from seqjax.decoding import PREFILL_CHUNK, Sampling, StopStrings, TextDecoder, tokens
from seqjax.evals.scoring import bucket_of
from seqjax.pretrained import Pretrained

LEAST_SPREAD = 32  # prompt lengths in a batch may differ by this much, or by the number of new tokens if larger


class Prompt(NamedTuple):
    """Prompt tokens, including BOS where needed, and generation settings."""

    ids: Sequence[int]
    until: tuple[str, ...]  # stop strings
    n_new: int  # maximum number of new tokens
    sampling: Sampling


Enough = Callable[[int, str], bool]  # (prompt index, text so far) -> whether to stop this text


def generate(
    m: Pretrained,
    prompts: Sequence[Prompt],
    *,
    batch_tokens: int,
    seed: int,
    prefill_chunk: int = PREFILL_CHUNK,
    enough: Enough = lambda i, text: False,
) -> list[str]:
    """Return the continuation of each prompt, in order.

    Args:
        m: The model.
        prompts: Prompts with at least one token each.
        batch_tokens: Approximate limit for the cache tokens in a batch; a batch has at least one prompt.
        seed: Sampling seed; unused at temperature 0.
        prefill_chunk: Prompt tokens per prefill call, as in `decoding.tokens`.
        enough: Stops a text early.
    """
    texts = [""] * len(prompts)
    for number, batch in enumerate(_batches(prompts, batch_tokens=batch_tokens, longest=m.model.longest)):
        first, longest = prompts[batch[0]], max(len(prompts[i].ids) for i in batch)
        rows = 1 << (len(batch) - 1).bit_length()  # few shapes: missing rows repeat the first prompt
        prompt_BT, lengths_B = np.zeros((rows, longest), np.int32), np.full(rows, len(first.ids))
        prompt_BT[:, : len(first.ids)] = first.ids
        for b, i in enumerate(batch):
            prompt_BT[b, : len(prompts[i].ids)], lengths_B[b] = prompts[i].ids, len(prompts[i].ids)
        new = tokens(
            m.params,
            prompt_BT,
            jax.random.fold_in(jax.random.key(seed), number),
            model=m.model,
            n_new=first.n_new,
            sampling=first.sampling,
            lengths_B=lengths_B,
            prefill_chunk=prefill_chunk,
            mesh=m.mesh,
        )
        for i, text in zip(batch, _texts(m.tokenizer, prompts, batch, new, enough), strict=True):
            texts[i] = text
    return texts


def _batches(prompts: Sequence[Prompt], *, batch_tokens: int, longest: int) -> Iterator[list[int]]:
    """Yield prompt indices per batch.

    A batch has equal settings, one length bucket and similar lengths.
    """
    groups: dict[tuple[int, Sampling, int], list[int]] = {}
    for i, prompt in enumerate(prompts):
        bucket = bucket_of(len(prompt.ids) + prompt.n_new, longest=longest)
        groups.setdefault((prompt.n_new, prompt.sampling, bucket), []).append(i)
    for (n_new, _, bucket), members in groups.items():
        max_size = 1 << (max(1, batch_tokens // bucket).bit_length() - 1)
        batch: list[int] = []
        for i in sorted(members, key=lambda i: -len(prompts[i].ids)):
            spread = len(prompts[batch[0]].ids) - len(prompts[i].ids) if batch else 0
            if len(batch) == max_size or spread > max(LEAST_SPREAD, n_new):
                yield batch
                batch = []
            batch.append(i)
        yield batch


def _texts(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], batch: Sequence[int], new: Iterator[np.ndarray], enough: Enough
) -> list[str]:
    """Return the texts for the prompt indices `batch`.

    Decoding stops when all texts have ended.
    """
    decoders = [TextDecoder(tokenizer, [token for token in prompts[i].ids if token != tokenizer.bos]) for i in batch]
    stops = [StopStrings(prompts[i].until) for i in batch]
    texts, n_written, ended = [""] * len(batch), [0] * len(batch), [False] * len(batch)
    shortest = min(len(prompts[i].ids) for i in batch)
    for position, token_B in enumerate(new, start=shortest):
        for b, i in enumerate(batch):
            if ended[b] or position < len(prompts[i].ids):
                continue
            token = int(token_B[b])
            is_end = token == tokenizer.eos
            n_written[b] += 1
            if not is_end:
                texts[b] += stops[b].push(decoders[b].push(token))
            if is_end or stops[b].matched or n_written[b] == prompts[i].n_new or enough(i, texts[b]):
                ended[b] = True
                texts[b] += stops[b].push(decoders[b].flush()) + stops[b].flush()
        if all(ended):
            break
    return texts
