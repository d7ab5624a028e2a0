"""Compute a bigram model's loss, a baseline from token-pair counts."""

import numpy as np

STRENGTHS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


def bigram_counts(blocks: np.ndarray, *, vocab_size: int) -> np.ndarray:
    """Return (token, next token) counts within the rows of `blocks` [n, T+1].

    The result is int64 [vocab, vocab].
    """
    pairs = blocks[:, :-1].astype(np.int64) * vocab_size + blocks[:, 1:]
    return np.bincount(pairs.ravel(), minlength=vocab_size**2).reshape(vocab_size, vocab_size)


def smoothed(counts: np.ndarray, *, strength: float) -> np.ndarray:
    """Return log p(next | token) of the interpolated bigram in nats.

    The result is float64 [vocab, vocab]. `strength` is k in the equation of `seqjax.data.corpus`.
    """
    unigram = counts.sum(0) + 1.0
    unigram /= unigram.sum()
    totals = counts.sum(1, keepdims=True)
    return np.log((counts + strength * unigram) / (totals + strength))


def bigram_loss(train: np.ndarray, evaluation: np.ndarray, *, vocab_size: int) -> float:
    """Return the loss of `evaluation` [m, T+1] in nats per token.

    The bigram is counted on `train` [n, T+1]. Its strength is the entry of `STRENGTHS` with the lowest loss on the last
    tenth of `train`.
    """
    n_held_out = max(1, len(train) // 10)
    fitted = bigram_counts(train[:-n_held_out], vocab_size=vocab_size)
    held_out = bigram_counts(train[-n_held_out:], vocab_size=vocab_size)
    strength = min(STRENGTHS, key=lambda k: -np.sum(held_out * smoothed(fitted, strength=k)))
    table = smoothed(fitted + held_out, strength=strength)
    test = bigram_counts(evaluation, vocab_size=vocab_size)
    return float(-np.sum(test * table) / test.sum())
