"""The `xla` token shift: array code in the input dtype, differentiated by JAX."""

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.backend import Backend
from kernels_pallas.segments import keep
from kernels_pallas.token_shift.interface import TokenShift


def load() -> TokenShift:
    """Return this module."""
    from kernels_pallas.token_shift import xla

    return xla


BACKEND = Backend("xla", load)


@jax.checkpoint
def run(
    x_BTD: Array,
    last_BD: Array | None,
    mus: tuple[Array, ...],
    moves_NBTD: Array | None,
    reach_BT: Array | None = None,
) -> tuple[Array, ...]:
    """Return the interpolations."""
    first_BD = jnp.zeros_like(x_BTD[:, 0]) if last_BD is None else last_BD
    before_BTD = jnp.concatenate([first_BD[:, None], x_BTD[:, :-1]], axis=1)
    delta_BTD = (before_BTD if reach_BT is None else keep(reach_BT > 0, before_BTD)) - x_BTD
    if moves_NBTD is None:
        return tuple(x_BTD + delta_BTD * mu_D.astype(x_BTD.dtype) for mu_D in mus)
    m_NBTD = jnp.stack(mus).astype(x_BTD.dtype)[:, None, None] + moves_NBTD
    return tuple(x_BTD + delta_BTD * m_NBTD)
