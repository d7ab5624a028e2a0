"""Token-by-token token shift, in the precision of its inputs; the tests' oracle."""

import jax.numpy as jnp
from jax import Array


def token_shift(
    x_BTD: Array, last_BD: Array | None, mus: tuple[Array, ...], moves_NBTD: Array | None
) -> tuple[Array, ...]:
    """Compute `kernels_pallas.token_shift` without intermediate rounding."""
    before_BD = jnp.zeros_like(x_BTD[:, 0]) if last_BD is None else last_BD
    y: list[list[Array]] = [[] for _ in mus]
    for t in range(x_BTD.shape[1]):
        x_BD = x_BTD[:, t]
        for n, mu_D in enumerate(mus):
            m = mu_D if moves_NBTD is None else mu_D + moves_NBTD[n, :, t]
            y[n].append((1 - m) * x_BD + m * before_BD)
        before_BD = x_BD
    return tuple(jnp.stack(rows, axis=1) for rows in y)
