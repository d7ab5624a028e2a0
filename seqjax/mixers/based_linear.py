"""Based's Taylor linear attention.

Arora et al., arXiv 2402.18668; public implementation: HazyResearch/based. Queries and keys have `feature_dim` channels
per head (ops/taylor.py); there are no biases or positions. Based combines this mixer with window attention
(transformer_pp, window 128) and gated short convolutions (based_conv) in configs/based.py.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.nn.initializers import residual_init
from seqjax.nn.layers import Linear
from seqjax.ops.taylor import CHUNK, taylor_features, taylor_linear_attention
from seqjax.types import Array, Layer


class TaylorCache(NamedTuple):
    """The float32 sums over keys; V + 1 columns.

    The first V columns hold features times values, the last column the features.
    """

    state_BHFV: Array


class BasedLinear(base.RecurrentMixer):
    """Taylor linear attention with its projections."""

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        feature_dim: int = 16,  # width of q and k per head
        chunk_size: int = CHUNK,  # tokens per chunk; affects the speed, not the result
        layer: Layer = Layer(),
        rngs: nnx.Rngs,
    ):
        base.at_least(1, heads=heads, feature_dim=feature_dim, chunk_size=chunk_size)
        if dim % heads:
            raise UserError(f"heads={heads} does not divide {base.size(dim=dim)}; choose heads that do.")
        self.dim, self.heads, self.feature_dim, self.chunk_size = dim, heads, feature_dim, chunk_size
        axes = ("embed", "heads")
        self.q = Linear(dim, heads * feature_dim, axes=axes, rngs=rngs)
        self.k = Linear(dim, heads * feature_dim, axes=axes, rngs=rngs)
        self.v = Linear(dim, dim, axes=axes, rngs=rngs)
        init = residual_init(layer.n_layers)
        self.out = Linear(dim, dim, axes=("heads", "embed"), init=init, rngs=rngs)

    def prefill(self, x_BTD: Array, cache: TaylorCache) -> tuple[Array, TaylorCache]:
        """Apply the parallel form to tokens that continue the cached sequence."""
        shape = (*x_BTD.shape[:2], self.heads, -1)
        q_BTHK, k_BTHK, v_BTHV = (p(x_BTD).reshape(shape) for p in (self.q, self.k, self.v))
        y_BTHV, state_BHFV = taylor_linear_attention(
            q_BTHK, k_BTHK, v_BTHV, initial_state=cache.state_BHFV, return_state=True, chunk_size=self.chunk_size
        )
        return self.out(y_BTHV.reshape(x_BTD.shape)), TaylorCache(state_BHFV)

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> TaylorCache:
        """Return an empty cache; the sums are float32 for every `dtype`."""
        del max_len, dtype
        shape = (batch, self.heads, taylor_features(self.feature_dim), self.dim // self.heads + 1)
        return TaylorCache(jnp.zeros(shape, jnp.float32))

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs per token of the chunked recurrence.

        Counts the scores and their product with v over half a chunk, the state update and the state read.
        """
        chunk = min(self.chunk_size, seq_len)
        values = self.dim + self.heads
        inside = (self.heads * self.feature_dim + values) * (chunk + 1)
        return inside + 4 * taylor_features(self.feature_dim) * values
