"""Row lookup in a table with a second use, such as a tied embedding and head.

With sharded tokens, each device accumulates a gradient of the table, and the gradients are summed. The gradients of the
second use should join the same sum over devices, which moves 98 MB at a vocabulary of 32,000 and 768 dimensions. XLA
does not merge the two sums by itself.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from seqjax.sharding import constrain_pieces, copies, time_to_rows, token_pieces
from seqjax.types import Array


def table_copies(table_OD: Float[Array, "O D"], tokens_BT: Int[Array, "B T"]) -> Float[Array, "N O D"] | None:
    """Return copies of a table for `lookup` and `cross_entropy`, one per token piece.

    Returns None for a single piece. Both functions add to the gradients of the copies; the table's gradient is the sum
    of the copies' gradients over devices.
    """
    pieces = token_pieces(tokens_BT)
    return copies(table_OD, pieces) if pieces > 1 else None


@jax.custom_vjp
def lookup(
    table_OD: Float[Array, "O D"], copies_NOD: Float[Array, "N O D"], tokens_BT: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Return `table_OD[tokens_BT]`, with the gradient going to the table's copies.

    The copies come from `table_copies`, one per token piece; it sums their gradients.
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
