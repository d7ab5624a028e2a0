"""Cheap tables by which a shortlist ranks chunks: a few rows of K numbers each.

With x = scale q . row:

    table       rows of a chunk                                          score
    mean        the mean key                                             x
    sub_means   the mean keys of 8 equal runs of the chunk               the largest x
    mean_eigen  the mean key, and sqrt(lambda) e of the largest          x_mean + x_eigen^2 / 2
                eigenvalue of the keys' covariance

All estimate how large a query's scores in a chunk are. mean_eigen adds half the score variance along e to the mean
score: for normally distributed keys, the logarithm of the mean exponential is the mean plus half the variance.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.numerics import accumulation_dtype
from kernels_pallas.validation import check_choice, check_chunk_size

RUNS = 8  # runs of keys per chunk, in sub_means
N_ROWS = {"mean": 1, "sub_means": RUNS, "mean_eigen": 2}
STEPS = 32  # power iterations: only matrix products; thousands of eigendecompositions would take seconds on a GPU


class Shortlist(NamedTuple):
    """The `size` past chunks with the largest table scores.

    Only their keys are scored. Hashable, hence static.
    """

    size: int
    table: str

    def holds_all(self, length: int, chunk_size: int) -> bool:
        """Return whether the list covers every past chunk of `length` tokens.

        The selection is then best_key.
        """
        return self.size >= (length - 1) // chunk_size


def check(table: str, chunk_size: int) -> None:
    """Raise ValueError unless the table is known and fits the chunk size."""
    check_choice("table", table, N_ROWS)
    check_chunk_size(chunk_size)
    if table == "sub_means" and chunk_size % RUNS:
        raise ValueError(
            f"table='sub_means' cuts a chunk into {RUNS} equal runs: chunk_size={chunk_size} must be a multiple of "
            f"{RUNS}, or choose table='mean'"
        )


def rows(k_XCK: Array, table: str, readable_XC: Array | None = None) -> Array:
    """Return the table rows of chunks, at least fp32: [..., C, K] -> [..., P, K].

    With `readable_XC`, rows cover the readable keys, which include a chunk's last key (documents.py).
    """
    k_XCK = k_XCK.astype(accumulation_dtype(k_XCK))
    if readable_XC is not None:
        return _rows_of_readable(k_XCK, table, readable_XC)
    if table == "sub_means":
        return run_means(k_XCK, RUNS)
    mean_X1K = run_means(k_XCK, 1)
    if table == "mean":
        return mean_X1K
    return jnp.concatenate([mean_X1K, _leading(k_XCK - mean_X1K)[..., None, :]], axis=-2)


def _rows_of_readable(k_XCK: Array, table: str, readable_XC: Array) -> Array:
    """Return the table rows over the readable keys; a run of keys without any gets the last run's mean."""
    runs = RUNS if table == "sub_means" else 1
    readable_XC1 = readable_XC[..., None]
    k_XCK = jnp.where(readable_XC1, k_XCK, 0)
    # a share is exactly 1 where all keys of a run are readable
    share_Xr1 = run_means(readable_XC1.astype(k_XCK.dtype), runs)
    mean_XrK = run_means(k_XCK, runs) / jnp.where(share_Xr1 > 0, share_Xr1, 1)
    mean_XrK = jnp.where(share_Xr1 > 0, mean_XrK, mean_XrK[..., -1:, :])
    if table != "mean_eigen":
        return mean_XrK
    centred_XCK = jnp.where(readable_XC1, k_XCK - mean_XrK, 0)
    return jnp.concatenate([mean_XrK, _leading(centred_XCK)[..., None, :] / jnp.sqrt(share_Xr1)], axis=-2)


def score(x_XP: Array, table: str) -> Array:
    """Return a chunk's table score from products x [..., P].

    x is the scale times the products of a query and the chunk's rows.
    """
    return x_XP[..., 0] + 0.5 * jnp.square(x_XP[..., 1]) if table == "mean_eigen" else x_XP.max(-1)


def run_means(k_XCK: Array, runs: int) -> Array:
    """Return the mean keys of equal runs of a chunk: [..., C, K] -> [..., runs, K]."""
    *X, C, K = k_XCK.shape
    return k_XCK.reshape(*X, runs, C // runs, K).mean(-2)


def _leading(centred_XCK: Array) -> Array:
    """Return sqrt(lambda) e for the largest eigenvalue of the covariance, [..., K].

    The sign is arbitrary.
    """
    product = partial(jnp.einsum, precision="highest")
    cov_XKK = product("...ck,...cl->...kl", centred_XCK, centred_XCK) / centred_XCK.shape[-2]

    def unit(e_XK: Array) -> Array:  # zero if all keys are equal
        square_X1 = jnp.square(e_XK).sum(-1, keepdims=True)
        return e_XK * jnp.where(square_X1 > 0, jax.lax.rsqrt(square_X1), 0)

    # start at the key that is farthest from the mean
    farthest_X11 = jnp.square(centred_XCK).sum(-1).argmax(-1)[..., None, None]
    e_XK = jnp.take_along_axis(centred_XCK, farthest_X11, axis=-2)[..., 0, :]
    e_XK = jax.lax.fori_loop(0, STEPS, lambda _, e_XK: unit(product("...kl,...l->...k", cov_XKK, e_XK)), unit(e_XK))
    value_X1 = jnp.square(product("...ck,...k->...c", centred_XCK, e_XK)).mean(-1, keepdims=True)
    return jnp.sqrt(value_X1) * e_XK
