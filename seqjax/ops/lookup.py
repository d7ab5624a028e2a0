"""Row lookup in a table with a second use, such as a tied embedding, which is also the head.

Devices that share the tokens each accumulate a gradient of the table, and these are then summed. The gradients of the
other use should join the same sum over devices, which moves 98 MB at a vocabulary of 32,000 and 768 dimensions. XLA
does not join the two by itself.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from seqjax.sharding import constrain_pieces, copies, time_to_rows, token_pieces
from seqjax.types import Array


def table_copies(table_OD: Float[Array, "O D"], tokens_BT: Int[Array, "B T"]) -> Float[Array, "N O D"] | None:
    """Return copies of a table for `lookup` and `cross_entropy`, one for each piece of the tokens; None for one piece.

    Both add to the gradients of the copies, and the gradient of the table is the sum of these over devices.
    """
    pieces = token_pieces(tokens_BT)
    return copies(table_OD, pieces) if pieces > 1 else None


@jax.custom_vjp
def lookup(
    table_OD: Float[Array, "O D"], copies_NOD: Float[Array, "N O D"], tokens_BT: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Return `table_OD[tokens_BT]`, whose gradient goes to the copies of the table, one for each piece of the tokens.

    The copies come from `table_copies`, which sums over them.
    """
    del copies_NOD
    return table_OD[tokens_BT]


def _forward(table_OD: Array, copies_NOD: Array, tokens_BT: Array) -> tuple[Array, tuple[Array, Array]]:
    return table_OD[tokens_BT], (copies_NOD, tokens_BT)


def _backward(saved: tuple[Array, Array], dx_BTD: Array) -> tuple[None, Array, None]:
    copies_NOD, tokens_BT = saved
    pieces, _, dim = copies_NOD.shape
    tokens_NR, dx_NRD = time_to_rows(tokens_BT).reshape(pieces, -1), time_to_rows(dx_BTD).reshape(pieces, -1, dim)
    zeros_NOD = constrain_pieces(jnp.zeros_like(copies_NOD), pieces)
    d_copies_NOD = jax.vmap(lambda d_table_OD, tokens_R, dx_RD: d_table_OD.at[tokens_R].add(dx_RD))(
        zeros_NOD, tokens_NR, dx_NRD
    )
    return None, constrain_pieces(d_copies_NOD, pieces), None


lookup.defvjp(_forward, _backward)
