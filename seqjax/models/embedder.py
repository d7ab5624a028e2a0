"""The embedder: tokens to the residual stream, final hidden states to logits."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from seqjax.config import ModelConfig
from seqjax.mixers.base import make_norm
from seqjax.models.attn_residual import DepthMix
from seqjax.nn.initializers import GPT_INIT, Init, uniform
from seqjax.nn.params import param
from seqjax.ops.lookup import lookup, table_copies
from seqjax.sharding import gather_fsdp
from seqjax.types import Array

EMBED_AXES = ("vocab", "embed")


class Embedder(nnx.Module):
    """Embedding with norm and positions (`encode`), final norm and head (`decode`).

    If the config ties them, the head is the transpose of the embedding. `max_len` is the length of the position table.
    With attention residuals, the model applies `mix` before the final norm.
    """

    def __init__(self, config: ModelConfig, *, max_len: int, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.dim)
        embed, head = _initializers(config)
        self.embed = param(rngs, embed, shape, EMBED_AXES)
        self.embed_norm = make_norm(config, rngs=rngs) if config.embed_norm else None
        learned, table = config.learned_positions, (max_len, config.dim)
        self.positions = param(rngs, GPT_INIT, table, ("positions", "embed")) if learned else None
        self.head = None if config.tie_embeddings else param(rngs, head, shape[::-1], ("embed", "vocab"))
        self.norm = make_norm(config, rngs=rngs)
        self.mix = DepthMix(config.dim, eps=config.norm_eps, rngs=rngs) if config.attn_residual else None

    def encode(
        self,
        tokens_BT: Array,
        start: Array | int = 0,
        *,
        positions_BT: Array | None = None,
        copies_NOD: Array | None = None,
    ) -> Array:
        """Return the embeddings [B, T, D] of tokens from position `start` on, or at `positions_BT`.

        `copies_NOD` holds a copy of the table per token piece; the table's gradient then goes to the copies.
        """
        table_OD = gather_fsdp(self.embed[...], EMBED_AXES)
        x_BTD = table_OD[tokens_BT] if copies_NOD is None else lookup(table_OD, copies_NOD, tokens_BT)
        if self.embed_norm is not None:
            x_BTD = self.embed_norm(x_BTD)
        if self.positions is not None and positions_BT is not None:
            x_BTD = x_BTD + self.positions[...][positions_BT]
        elif self.positions is not None:
            x_BTD = x_BTD + jax.lax.dynamic_slice_in_dim(self.positions[...], start, tokens_BT.shape[1])
        return x_BTD

    def copies(self, tokens_BT: Array) -> Array | None:
        """Return copies [N, O, D] of a tied table, one per token piece, or None.

        Both gradients of the table go to the copies and are summed over devices at once. None for a single piece or an
        untied head.
        """
        return table_copies(self.embed[...], tokens_BT) if self.head is None else None

    @property
    def unembedding(self) -> Any:
        """The matrix [D, O] that maps hidden states to logits."""
        return self.embed[...].T if self.head is None else self.head[...]

    def decode(self, h: Array) -> Array:
        """Return the float32 logits [..., O] for normalised hidden states [..., D]."""
        w_DO = self.unembedding.astype(h.dtype)
        return jnp.einsum("...d,do->...o", h, w_DO, preferred_element_type=jnp.float32)


def _initializers(config: ModelConfig) -> tuple[Init, Init]:
    """Return the initialisers of embedding and head.

    RWKV's tiny embedding requires its norm and an untied head.
    """
    if config.init == "gpt" or config.tie_embeddings:
        return GPT_INIT, GPT_INIT
    scale = 0.5 * math.sqrt(max(1.0, config.vocab_size / config.dim))
    return uniform(1e-4), jax.nn.initializers.orthogonal(scale)
