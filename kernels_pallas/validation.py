"""Argument checks of the public functions; each message contains the fix."""

import difflib
from collections.abc import Iterable


def check_attention(q_shape: tuple, k_shape: tuple, v_shape: tuple | None = None) -> None:
    """Raise ValueError unless q, k and v agree and G divides H.

    Shapes: q [B, T, H, K], k [B, T, G, K], v [B, T, G, V].
    """
    for name, shape in (("q", q_shape), ("k", k_shape), ("v", v_shape)):
        if shape is not None and len(shape) != 4:
            raise ValueError(f"{name} must be [batch, time, heads, dim]; got {len(shape)} axes: {tuple(shape)}")
    batch, time, heads, key_dim = q_shape
    if time < 1:
        raise ValueError(f"q has no time step; T must be at least 1: {tuple(q_shape)}")
    if tuple(k_shape[:2]) != (batch, time) or k_shape[3] != key_dim:
        raise ValueError(f"k must share batch, time and key dim with q: q is {tuple(q_shape)}, k is {tuple(k_shape)}")
    if v_shape is not None and tuple(v_shape[:3]) != tuple(k_shape[:3]):
        raise ValueError(f"v must share batch, time and heads with k: k is {tuple(k_shape)}, v is {tuple(v_shape)}")
    check_groups(heads, k_shape[2])


def check_per_head(name: str, shape: tuple, q_shape: tuple) -> None:
    """Raise ValueError unless an operand has the shape [B, T, H] of q [B, T, H, K]."""
    if tuple(shape) != tuple(q_shape[:3]):
        raise ValueError(
            f"{name} must be [batch, time, query heads] like q: q is {tuple(q_shape)}, {name} is {tuple(shape)}"
        )


def check_decode(q_shape: tuple, k_shape: tuple, v_shape: tuple) -> None:
    """Raise ValueError unless q and the caches agree and G divides H.

    Shapes: q [B, H, K], caches [B, S, G, K] and [B, S, G, V].
    """
    if len(q_shape) != 3 or len(k_shape) != 4 or len(v_shape) != 4:
        raise ValueError(
            "one decoding step takes q [batch, heads, dim] and caches [batch, max_len, kv heads, dim]; "
            f"got q {tuple(q_shape)}, k {tuple(k_shape)}, v {tuple(v_shape)}"
        )
    if q_shape[0] != k_shape[0] or q_shape[2] != k_shape[3]:
        raise ValueError(
            f"the k cache must share batch and key dim with q: q is {tuple(q_shape)}, k is {tuple(k_shape)}"
        )
    if tuple(v_shape[:3]) != tuple(k_shape[:3]):
        raise ValueError(f"the caches disagree: k is {tuple(k_shape)}, v is {tuple(v_shape)}")
    check_groups(q_shape[1], k_shape[2])


def check_groups(heads: int, groups: int) -> None:
    """Raise ValueError unless the key-value heads divide the query heads."""
    if groups < 1 or heads % groups:
        raise ValueError(f"{heads} query heads cannot share {groups} key-value heads: the second must divide the first")


def check_chunk_size(chunk_size: int) -> None:
    """Raise ValueError unless the chunk has at least one key."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")


def check_choice(what: str, value: str, known: Iterable[str]) -> None:
    """Raise ValueError if `value` is unknown.

    The message has the nearest known value and the list.
    """
    names = list(known)
    if value not in names:
        close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown {what} {value!r}.{hint} Known: {', '.join(names)}.")
