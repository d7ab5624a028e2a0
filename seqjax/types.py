"""The dimension legend and the array aliases that every file shares.

Arrays carry their shape in their name: `x_BTD` is [batch, time, model width]. One letter, one meaning:

    B batch            T time (queries)     S time (keys)        D model width
    H heads            K key / query dim    V value dim          G key-value heads (GQA)
    E inner width      N state size         C chunk length       c number of chunks
    F MLP inner width  O vocabulary         L layers

`x_BD` is one time step. Where two arrays differ in time, S is the side that is looked at.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

Array = jax.Array
PRNGKey = jax.Array
# A nested dict of arrays: parameters, gradients, caches. Plain data, no framework objects.
Params = dict[str, Any]
Cache = Any


class LayerSpec(NamedTuple):
    """What a mixer may know of its place in the model, and no more.

    `layer` is 0-based and may be traced (layers are initialised under `vmap`), so use it in arithmetic only.
    `max_len` is the training sequence length T; only mixers with tables over positions need it.
    """

    dim: int
    n_layers: int
    layer: Any
    max_len: int


@runtime_checkable
class Mixer(Protocol):
    """What `seqjax/mixers/NAME.py` exports as `Mixer`: an nnx.Module with these methods (docs/add_a_mixer.md)."""

    def __call__(self, x_BTD: Array) -> Array:
        """Parallel form: [B, T, D] -> [B, T, D], causal in T, any T >= 1."""
        ...

    def init_cache(self, batch: int, max_len: int, dtype: Any) -> Cache:
        """An empty cache for `step`; a NamedTuple of arrays."""
        ...

    def step(self, x_BD: Array, cache: Cache) -> tuple[Array, Cache]:
        """Recurrent form: one token; equals the parallel form over the tokens seen so far."""
        ...

    def flops_per_token(self, seq_len: int) -> float:
        """Forward FLOPs per token beside those of the parameters, averaged over a causal sequence of `seq_len`."""
        ...

    def state_size(self, seq_len: int) -> int:
        """Elements a decode cache holds per sequence after `seq_len` tokens, in this layer."""
        ...
