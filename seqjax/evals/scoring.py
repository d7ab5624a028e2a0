"""Score continuations in a few compiled shapes: length buckets, batches by tokens.

A row holds a context and its continuation except the last token, which the model only predicts. Requests with the same
row, such as the answers "A" to "D" to a question, share one forward pass; each request reads the likelihood of its last
token there. Rows are right-padded to a power of two, at least 64. Rows of 128 and more are therefore whole chunks for
Top-1 Chunk. Causal mixers never see the padding. Sums are float32 and computed on the device, so only a few numbers per
row are transferred.
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
CANDIDATES = 16  # last tokens per row; further requests get another row


class Score(NamedTuple):
    """The score of one continuation, as lm-evaluation-harness expects it."""

    log_p: float  # nats, summed over the continuation
    is_greedy: bool  # whether every continuation token is the most likely one


class Row(NamedTuple):
    """Tokens to feed, and the requests that share them."""

    tokens: np.ndarray  # int32 [n]
    n_marked: int  # continuation tokens in the row: all except the last
    requests: list[tuple[int, int]]  # (request index, its last token)


def score(
    model: Model,
    params: Params,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_length: int,
    batch_tokens: int,
    mesh: Mesh,
) -> list[Score]:
    """Return the score of each (context, continuation) pair, in order.

    Args:
        model: The model.
        params: Its parameters.
        requests: Token ids of contexts and continuations, at least one token each.
        max_length: Maximum number of tokens fed; a longer row keeps the last `max_length` tokens.
        batch_tokens: Approximate number of tokens per batch; a batch has at least one row.
        mesh: The mesh that holds the parameters.

    Raises `ValueError` for an empty context or continuation, and for a continuation longer than `max_length`.
    """
    pending = []
    for bucket, bucket_rows in _by_bucket(_rows(requests, max_length), longest=model.longest).items():
        size = batch_size(len(bucket_rows), bucket, batch_tokens=batch_tokens, mesh=mesh)
        for i in range(0, len(bucket_rows), size):
            rows = bucket_rows[i : i + size]
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
    """Return the padded length for `n_tokens`.

    `longest` is the size of the model's position table (0 = no table), and limits the padding.
    """
    bucket = max(SMALLEST_BUCKET, 1 << (n_tokens - 1).bit_length())
    return max(n_tokens, min(bucket, longest)) if longest else bucket


def batch_size(n_rows: int, bucket: int, *, batch_tokens: int, mesh: Mesh) -> int:
    """Return the rows per batch, a multiple of the batch shards; `n_rows` limits it."""
    shards = batch_shards(mesh)
    max_rows = max(1, batch_tokens // bucket)
    return -(-min(max_rows, 1 << (n_rows - 1).bit_length()) // shards) * shards


def _rows(requests: Sequence[tuple[Sequence[int], Sequence[int]]], max_length: int) -> list[Row]:
    """Return the rows, longest first.

    Rows of equal length keep the order of their first requests.
    """
    open_rows: dict[tuple[bytes, int], Row] = {}  # the last row with these tokens
    rows = []
    for i, (context, continuation) in enumerate(requests):
        if not len(context) or not 1 <= len(continuation) <= max_length:
            raise ValueError(
                f"request {i} has {len(context)} context tokens and {len(continuation)} continuation tokens; both need "
                f"at least one, and the continuation at most max_length={max_length}"
            )
        fed = np.array([*context, *continuation][-(max_length + 1) : -1], np.int32)
        key = (fed.tobytes(), len(continuation))
        row = open_rows.get(key)
        if row is None or len(row.requests) == CANDIDATES:
            row = open_rows[key] = Row(fed, len(continuation) - 1, [])
            rows.append(row)
        row.requests.append((i, int(continuation[-1])))
    return sorted(rows, key=lambda row: -len(row.tokens))


def _by_bucket(rows: Sequence[Row], *, longest: int) -> Mapping[int, list[Row]]:
    buckets: dict[int, list[Row]] = {}
    for row in rows:
        buckets.setdefault(bucket_of(len(row.tokens), longest=longest), []).append(row)
    return buckets


def _batch(rows: Sequence[Row], *, size: int, bucket: int) -> tuple[np.ndarray, ...]:
    """Return the inputs for `Model.continuation_scores`.

    They are padded with 0 to `size` rows and `CANDIDATES` candidates.
    """
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
