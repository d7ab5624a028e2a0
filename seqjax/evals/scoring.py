"""Log-likelihoods of continuations in few compiled shapes: length buckets, and batches of about as many tokens.

A row is a context with a continuation, without the last token, which is not fed. Requests that share a whole row, such
as the four answers "A" to "D" of a question, are computed once, and each reads its own last token there. Rows are
padded on the right up to a power of two, at least 64 and so from 128 on to whole chunks of Top-1 Chunk; no causal mixer
sees the padding. Sums are float32 and computed on the device, which returns a few numbers per row.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from seqjax.models import Model
from seqjax.sharding import batch_sharding
from seqjax.training.step import batch_shards
from seqjax.types import Array, Params

SMALLEST_BUCKET = 64
CANDIDATES = 16  # last tokens of a row; those of more requests make another row


class Score(NamedTuple):
    """The result of a language model of lm-evaluation-harness for a continuation."""

    log_p: float  # nats, summed over the continuation
    is_greedy: bool  # whether each of its tokens is the most likely one


class Row(NamedTuple):
    """Tokens to feed, the number of last ones in the continuation, and the requests that end in each last token."""

    tokens: np.ndarray  # int32 [n]
    n_marked: int  # tokens of the continuation without its last one
    requests: list[tuple[int, int]]  # index of the request, and its last token


def score(
    model: Model,
    params: Params,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_length: int,
    batch_tokens: int,
    mesh: Mesh,
) -> list[Score]:
    """Return the scores of pairs of context and continuation, in their order.

    Args:
        model: The model.
        params: Its parameters.
        requests: Tokens of context and continuation, at least one of each.
        max_length: Largest number of tokens fed; longer rows keep the last `max_length` before the last token.
        batch_tokens: Rows of a bucket together have about this many tokens, and there is at least one.
        mesh: The mesh over which the parameters are spread.

    Raises `ValueError` for a context or continuation without a token, and for a continuation of more than `max_length`.
    """
    pending = []
    for bucket, of_bucket in _by_bucket(_rows(requests, max_length), longest=model.longest).items():
        size = batch_size(len(of_bucket), bucket, batch_tokens=batch_tokens, mesh=mesh)
        for i in range(0, len(of_bucket), size):
            rows = of_bucket[i : i + size]
            batch = jax.device_put(_batch(rows, size=size, bucket=bucket), batch_sharding(mesh))
            with jax.set_mesh(mesh):
                pending.append((rows, _scores(params, *batch, model=model)))
    scores: list[Any] = [None] * len(requests)
    for rows, on_device in pending:
        log_p_B, missed_B, last_log_p_BC, best_B = jax.device_get(on_device)
        for b, row in enumerate(rows):
            for c, (request, last) in enumerate(row.requests):
                is_greedy = missed_B[b] == 0 and best_B[b] == last
                scores[request] = Score(float(log_p_B[b] + last_log_p_BC[b, c]), bool(is_greedy))
    return scores


def bucket_of(n_tokens: int, *, longest: int) -> int:
    """Return the padded length of `n_tokens`; a table of `longest` positions (0 = none) ends the last bucket."""
    bucket = max(SMALLEST_BUCKET, 1 << (n_tokens - 1).bit_length())
    return max(n_tokens, min(bucket, longest)) if longest else bucket


def batch_size(n_rows: int, bucket: int, *, batch_tokens: int, mesh: Mesh) -> int:
    """Return the number of rows of a batch, a multiple of the devices that share it; few rows make a small batch."""
    shards = batch_shards(mesh)
    most = max(1, batch_tokens // bucket)
    return -(-min(most, 1 << (n_rows - 1).bit_length()) // shards) * shards


def _rows(requests: Sequence[tuple[Sequence[int], Sequence[int]]], max_length: int) -> list[Row]:
    """Return the rows, the longest first, those of one length in the order of their first requests."""
    rows: dict[tuple[bytes, int], Row] = {}
    done = []
    for i, (context, continuation) in enumerate(requests):
        if not len(context) or not 1 <= len(continuation) <= max_length:
            raise ValueError(
                f"request {i} has {len(context)} tokens of context and {len(continuation)} of continuation; at least "
                f"one of each is needed, and the continuation has at most {max_length} (max_length)"
            )
        fed = np.array([*context, *continuation][-(max_length + 1) : -1], np.int32)
        key = (fed.tobytes(), len(continuation))
        row = rows.get(key)
        if row is None or len(row.requests) == CANDIDATES:
            row = rows[key] = Row(fed, len(continuation) - 1, [])
            done.append(row)
        row.requests.append((i, int(continuation[-1])))
    return sorted(done, key=lambda row: -len(row.tokens))


def _by_bucket(rows: Sequence[Row], *, longest: int) -> Mapping[int, list[Row]]:
    buckets: dict[int, list[Row]] = {}
    for row in rows:
        buckets.setdefault(bucket_of(len(row.tokens), longest=longest), []).append(row)
    return buckets


def _batch(rows: Sequence[Row], *, size: int, bucket: int) -> tuple[np.ndarray, ...]:
    """Return the inputs of `Model.continuation_scores`; missing rows and candidates are filled with 0."""
    tokens_BT = np.zeros((size, bucket), np.int32)
    marks_BT = np.zeros((size, bucket), np.float32)
    last_B = np.zeros(size, np.int32)
    candidates_BC = np.zeros((size, CANDIDATES), np.int32)
    for b, row in enumerate(rows):
        n = len(row.tokens)
        tokens_BT[b, :n] = row.tokens
        last_B[b] = n - 1
        marks_BT[b, n - 1 - row.n_marked : n - 1] = 1  # position i predicts token i + 1
        candidates_BC[b, : len(row.requests)] = [last for _, last in row.requests]
    return tokens_BT, marks_BT, last_B, candidates_BC


@functools.partial(jax.jit, static_argnames="model")
def _scores(
    params: Params, tokens_BT: Array, marks_BT: Array, last_B: Array, candidates_BC: Array, *, model: Model
) -> tuple[Array, ...]:
    return model.continuation_scores(params, tokens_BT, marks_BT, last_B, candidates_BC)
