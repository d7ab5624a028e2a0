"""The queries and keys of every layer, to look at what attention sees and what a selection chooses.

They come from a separate forward pass, not from that of training, and all of them exist at once: for short sequences.
"""

import jax.numpy as jnp

from seqjax.errors import UserError
from seqjax.models.language_model import Model, State
from seqjax.nn.params import unstack
from seqjax.types import Array, Params


def queries_and_keys(model: Model, params: Params, tokens_BT: Array) -> list[tuple[Array, Array] | None]:
    """Return the queries [B, T, H, K] and keys [B, T, G, K] of every layer; None for a layer that has none.

    They are as the layer scores them: normalised and rotated, in the compute dtype, not yet scaled. Raises `UserError`
    if no layer has any.
    """
    n_batch = tokens_BT.shape[0]

    def group(state: State, layers: Params, first_layer: Array) -> tuple[State, Params]:
        found = {}
        for i, (place, template) in enumerate(model.blocks.items()):
            block, (x_BTD, carry) = template.bind(layers[place]), state
            both = block.mixer.queries_and_keys(block.mixer_input(x_BTD, model.dtype))
            if both is not None:
                found[place] = tuple(jnp.broadcast_to(x, (n_batch, *x.shape[1:])) for x in both)
            state = block(x_BTD, carry, layer=first_layer + i, dtype=model.dtype)
        return state, found

    _, found = model.over_layers(group, model.initial_state(params, tokens_BT), params["blocks"])
    if not found:
        raise UserError(
            f"{model.config.mixer_names}: no layer has queries and keys. Take a model with attention or Top-1 layers, "
            "such as --config=top1_chunk."
        )
    groups = unstack(found, model.repeats)
    return [of_group.get(place) for of_group in groups for place in model.blocks]
