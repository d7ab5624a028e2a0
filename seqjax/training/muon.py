"""Muon and NorMuon: orthogonalised momentum, as optax transformations.

For a matrix with gradient g [in, out], momentum b and step t (from 1):

    m <- b m + (1 - b) g
    Muon:     u = b m / (1 - b^(t+1)) + (1 - b) g / (1 - b^t),  X = orthogonalize(u)
    NorMuon:  u = b m + (1 - b) g,  X = orthogonalize(u),  v <- 0.95 v + 0.05 mean over inputs of X^2,
              X <- X / (sqrt(v) + 1e-10), rescaled to its earlier Frobenius norm
    update = s X,  s = sqrt(max(1, out / in)) ("spectral") or 0.2 sqrt(max(in, out)) ("rms")

`optimizer` (seqjax/training/schedule.py) chooses the matrices. Layers are stacked along leading axes; each matrix is
orthogonalised separately.

Sources: Muon, Jordan 2024 (KellerJordan/Muon), with the bias corrections of `optax.contrib.scale_by_muon`; "rms", Liu
et al. 2025 (arXiv 2502.16982, Section 2.2); NorMuon, zichongli5/NorMuon. The public code iterates in bfloat16, and this
file in the dtype of the parameters.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from seqjax.sharding import whole_matrices
from seqjax.types import Array, Params

COEFFICIENTS, ITERATIONS = (3.4445, -4.7750, 2.0315), 5  # of the quintic polynomial, with the largest slope at zero
EPS = 1e-8  # smallest divisor; a zero gradient has a zero update
RMS = 0.2  # RMS of Adam's updates, as measured by Liu et al.
NORMUON_DECAY, NORMUON_EPS = 0.95, 1e-10
Scale = Literal["spectral", "rms"]


def orthogonalize(x: Array) -> Array:
    """Return nearly orthogonal matrices with the singular vectors of `x`.

    `x` is [..., in, out]; leading axes are separate matrices. Five Newton-Schulz steps bring the singular values from
    (0, 1], after division by the Frobenius norm, to about 0.7 to 1.2.
    """
    a, b, c = COEFFICIENTS
    is_tall = x.shape[-2] > x.shape[-1]
    x = whole_matrices(x)
    x = jnp.swapaxes(x, -2, -1) if is_tall else x
    x = x / jnp.maximum(_norm(x), EPS)

    def iterate(_: Any, x: Array) -> Array:
        xx = x @ jnp.swapaxes(x, -2, -1)
        return a * x + (b * xx + c * xx @ xx) @ x

    x = jax.lax.fori_loop(0, ITERATIONS, iterate, x)
    return whole_matrices(jnp.swapaxes(x, -2, -1) if is_tall else x)


def _norm(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), (-2, -1), keepdims=True))


def factor(shape: tuple[int, ...], scale: Scale) -> float:
    """Return the factor s on the update of a matrix [..., in, out]."""
    n_in, n_out = shape[-2:]
    return math.sqrt(max(1, n_out / n_in)) if scale == "spectral" else RMS * math.sqrt(max(n_in, n_out))


class MuonState(NamedTuple):
    """Hold the step count and each matrix's momentum."""

    count: Any  # int32 scalar
    momentum: Params


def scale_by_muon(momentum: float, *, scale: Scale) -> optax.GradientTransformation:
    """Return Muon's update, for a learning rate of 1 and without sign.

    Every parameter must be a matrix or a stack of matrices, [..., in, out].
    """

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        del params
        count: Any = optax.safe_increment(state.count)
        moments = jax.tree.map(_moving_average(momentum), state.momentum, updates)

        def of_matrix(m: Array, g: Array) -> Array:
            b, t = jnp.asarray(momentum, m.dtype), count.astype(m.dtype)
            u = b * m / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t)
            return factor(u.shape, scale) * orthogonalize(u)

        return jax.tree.map(of_matrix, moments, updates), MuonState(count, moments)

    return optax.GradientTransformation(init, update)


class NorMuonState(NamedTuple):
    """Hold each matrix's momentum and the outputs' mean squares, [..., 1, out]."""

    momentum: Params
    squares: Params


def scale_by_normuon(momentum: float, *, scale: Scale) -> optax.GradientTransformation:
    """Return NorMuon's update, for a learning rate of 1 and without sign.

    Every parameter must be a matrix or a stack of matrices, [..., in, out].
    """

    def init(params: Any) -> NorMuonState:
        squares = jax.tree.map(lambda x: jnp.zeros((*x.shape[:-2], 1, x.shape[-1]), x.dtype), params)
        return NorMuonState(jax.tree.map(jnp.zeros_like, params), squares)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, NorMuonState]:
        del params
        moments = jax.tree.map(_moving_average(momentum), state.momentum, updates)
        directions = jax.tree.map(lambda m, g: orthogonalize(_moving_average(momentum)(m, g)), moments, updates)
        squares = jax.tree.map(
            lambda v, x: _moving_average(NORMUON_DECAY)(v, jnp.mean(jnp.square(x), -2, keepdims=True)),
            state.squares,
            directions,
        )

        def of_matrix(x: Array, v: Array) -> Array:
            normed = x / (jnp.sqrt(v) + NORMUON_EPS)
            return factor(x.shape, scale) * normed * (_norm(x) / (_norm(normed) + NORMUON_EPS))

        return jax.tree.map(of_matrix, directions, squares), NorMuonState(moments, squares)

    return optax.GradientTransformation(init, update)


def _moving_average(decay: float) -> Callable[[Array, Array], Array]:
    return lambda mean, x: decay * mean + (1 - decay) * x
