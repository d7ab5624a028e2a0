"""Inspection of attention: the entropy of its weights, and its queries and keys.

    E_i = -sum_j p_ij ln p_ij

arXiv 2505.18522, section 3. Both come from a separate forward pass, not from training. Queries and keys of all layers
exist at once, which limits `queries_and_keys` to short sequences.
"""

import jax
import jax.numpy as jnp

from seqjax.errors import UserError
from seqjax.models.language_model import Model, State
from seqjax.nn.params import unstack
from seqjax.sharding import constrain_batch
from seqjax.types import Array, Params


def mean_entropy(model: Model, params: Params, tokens_BT: Array) -> tuple[Array, Array]:
    """Return the mean attention entropy in nats and relative to ln(i + 1).

    Both are float32 [L, B]. ln(i + 1) is the maximum at position i. The means are over heads and over positions i >= 1
    (position 0 has only one key), for each layer with attention weights; in a hybrid, only the softmax attention
    layers. Raises `UserError` if no layer has attention weights, or if T is 1.
    """
    n_tokens = tokens_BT.shape[1]
    if model.documents is not None:
        raise UserError(
            "The entropy is measured over the whole past, which a model with config.data.reset=True does not read. "
            "Omit --entropy and leave config.eval.entropy_tokens at 0."
        )
    if n_tokens < 2:
        raise UserError("Entropy needs a position with several keys: set a config.train.seq_len of at least 2.")
    max_entropy_T = jnp.log(jnp.arange(2, n_tokens + 1, dtype=jnp.float32))

    def group(state: State, layers: Params, first_layer: Array) -> tuple[State, Params]:
        measured = {}
        for i, (slot, template) in enumerate(model.blocks.items()):
            block, (x_BTD, carry) = template.bind(layers[slot]), state
            e_BTH = block.entropy(block.input_of(x_BTD, carry, layer=first_layer + i), dtype=model.dtype)
            if e_BTH is not None:
                e_BT = jnp.mean(e_BTH, axis=-1)[:, 1:]
                measured[slot] = jnp.mean(e_BT, axis=1), jnp.mean(e_BT / max_entropy_T, axis=1)
            x_BTD, carry = block(x_BTD, carry, layer=first_layer + i, dtype=model.dtype)
            state = constrain_batch(x_BTD), carry
        return state, measured

    _, measured = model.over_layers(group, model.initial_state(params, tokens_BT), params["blocks"])
    if not measured:
        raise UserError(
            f"{model.config.mixer_names}: no layer has softmax weights over the past, so there is no entropy to "
            "measure. Omit --entropy and leave config.eval.entropy_tokens at 0."
        )
    nats_LB, relative_LB = (jnp.concatenate(parts) for parts in zip(*measured.values(), strict=True))
    return nats_LB, relative_LB


def require_entropy(model: Model) -> None:
    """Raise the `UserError` of `mean_entropy`, if any, without computing."""
    tokens_BT = jax.ShapeDtypeStruct((1, model.max_len), jnp.int32)
    jax.eval_shape(lambda params, tokens: mean_entropy(model, params, tokens), model.shapes, tokens_BT)


def queries_and_keys(model: Model, params: Params, tokens_BT: Array) -> list[tuple[Array, Array] | None]:
    """Return each layer's queries [B, T, H, K] and keys [B, T, G, K], or None.

    They are normalised and rotated, in the compute dtype, not yet scaled. Raises `UserError` if no layer has any.
    """
    n_batch = tokens_BT.shape[0]

    def group(state: State, layers: Params, first_layer: Array) -> tuple[State, Params]:
        by_position = {}
        for i, (slot, template) in enumerate(model.blocks.items()):
            block, (x_BTD, carry) = template.bind(layers[slot]), state
            read_BTD = block.input_of(x_BTD, carry, layer=first_layer + i)
            pair = block.mixer.queries_and_keys(block.mixer_input(read_BTD, model.dtype))
            if pair is not None:
                by_position[slot] = tuple(jnp.broadcast_to(x, (n_batch, *x.shape[1:])) for x in pair)
            state = block(x_BTD, carry, layer=first_layer + i, dtype=model.dtype)
        return state, by_position

    _, by_position = model.over_layers(group, model.initial_state(params, tokens_BT), params["blocks"])
    if not by_position:
        raise UserError(
            f"{model.config.mixer_names}: no layer has queries and keys. Take a model with attention or Top-1 layers, "
            "such as --config=top1_chunk."
        )
    groups = unstack(by_position, model.repeats)
    return [pairs.get(slot) for pairs in groups for slot in model.blocks]
