"""The dimension letters and type aliases that all files share.

The suffix of an array's name is its shape: `x_BTD` is [batch, time, model width]. Each letter has one meaning:

    B batch             T time (queries)      S time (keys)         D model width
    H heads             K key / query dim     V value dim           G key-value heads (GQA)
    E inner width       N state size          C chunk length        c number of chunks
    F feature-map dim   W convolution taps    M rank (low-rank)     R query heads per G
    L layers            A micro-batches       P parts side by side  O vocabulary
    J rotary pairs (K/2)

`x_BD` is one time step. If two arrays differ in time, S is the time that queries attend to or look up in. `x_BTE` also
denotes a projection to all heads (E = H * K) before the heads are split. Query and key within one chunk are both C:
`scores_cBHCC`. A digit is a size: `x_B1`; the exception is `tokens_BT1` with T + 1 tokens. An array without a suffix
may have any leading axes. The matrices in `kernels_pallas.unit_lower_inverse` may too; their names give the last two
axes: `m_CC`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array
PRNGKey = jax.Array
# A nested dict of arrays: parameters or gradients as plain data, without framework objects.
Params = dict[str, Any]
Cache = Any


class Layer(NamedTuple):
    """A mixer's position in a model, for its initial values and position tables.

    `index` is 0-based and may be traced (layers are initialised under `vmap`), so use it only in arithmetic. `max_len`
    is the training sequence length T. `first` is the index of the model's first layer with a block that carries the
    same arrays to later layers. The default is the only layer of a model.
    """

    index: Any = 0
    n_layers: int = 1
    max_len: int = 2048
    first: int = 0


def require_array(name: str, value: Any, axes: str, *, integer: bool = False, last: int | None = None) -> None:
    """Raise a one-line error unless `value` is an array with these axes and numbers.

    Args:
        name: Argument name for the error.
        value: The argument.
        axes: Names of the axes, such as `B, T, D`.
        integer: True for integers, such as token ids; otherwise floating-point numbers.
        last: Required size of the last axis; None accepts any size.

    Raises:
        TypeError: `value` is not an array, or its dtype is wrong.
        ValueError: The shape is wrong.
    """
    kind = "integers" if integer else "floating-point numbers"
    expected = f"an array of {kind} with the shape [{axes}]"
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{name} is {type(value).__name__} instead of {expected}.")
    shape, dtype = tuple(value.shape), value.dtype
    if not jnp.issubdtype(dtype, jnp.integer if integer else jnp.floating):
        raise TypeError(f"{name} has the dtype {dtype} instead of {'int32' if integer else 'float32 or bfloat16'}.")
    if len(shape) != axes.count(",") + 1 or (last is not None and shape[-1] != last):
        size = f", {axes.rpartition(', ')[2]} = {last}" if last is not None else ""
        raise ValueError(f"{name} has the shape {shape} instead of [{axes}]{size}.")
