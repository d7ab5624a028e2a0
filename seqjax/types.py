"""The dimension legend and the array aliases that every file shares.

Arrays carry their shape in their name: `x_BTD` is [batch, time, model width]. Each letter has one meaning:

    B batch             T time (queries)      S time (keys)         D model width
    H heads             K key / query dim     V value dim           G key-value heads (GQA)
    E inner width       N state size          C chunk length        c number of chunks
    F feature-map dim   W convolution taps    M rank (low-rank)     R query heads per G
    L layers            A micro-batches       P parts side by side  O vocabulary

`x_BD` is one time step. Where two arrays differ in time, S is the side that is attended to. `x_BTE` is also what a
projection to all heads returns (E = H * K), before the heads are split. A digit is a size: `x_BT1`. An array without a
suffix may have any leading axes.
"""

from typing import Any, NamedTuple

import jax

Array = jax.Array
PRNGKey = jax.Array
# A nested dict of arrays: parameters, gradients, caches. Plain data, no framework objects.
Params = dict[str, Any]
Cache = Any


class LayerSpec(NamedTuple):
    """What a mixer may know of its place in the model when it is built.

    `layer` is 0-based and may be traced (layers are initialised under `vmap`), so it may be used in arithmetic only.
    `max_len` is the training sequence length T; only mixers with tables over positions need it.
    """

    dim: int
    n_layers: int
    layer: Any
    max_len: int
