"""The level of a pair of positions in a Fenwick tree."""

import numpy as np


def level(later: np.ndarray | int, earlier: np.ndarray | int, n_levels: int) -> np.ndarray | np.integer:
    """Return l(t, s) for positions s <= t, with `n_levels` levels."""
    _, exponent = np.frexp(np.bitwise_xor(later, earlier).astype(np.float64))  # 0 for 0, i + 1 for 2^i
    return np.minimum(exponent, n_levels - 1)
