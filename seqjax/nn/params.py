"""Parameters as plain nested dicts; the only file that splits and merges modules.

An `nnx.Module` declares parameters and their shapes; a `Template` holds the module's structure without arrays. After
that the model is a plain dict under `jax.jit`, `jax.grad` and `jax.lax.scan`, and `Template.bind` rebuilds the module
inside a trace to call its methods. Layers that share a template are stacked along a leading axis.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from seqjax.errors import UserError
from seqjax.nn.initializers import Init
from seqjax.sharding import is_axes
from seqjax.types import Array, Params, PRNGKey

Build = Callable[[nnx.Rngs, Any], nnx.Module]
Module = TypeVar("Module", bound=nnx.Module)


class _ShapesOnly(nnx.Rngs):
    """A marker for `param` to skip initial values.

    Tracing the initial values takes most of the time for finding a structure.
    """


Group = Literal["matrix", "vector", "embedding", "convolution", "auxiliary"]
GROUPS: tuple[Group, ...] = get_args(Group)
# Groups by the parameter names of Flax layers, which have no logical axes.
_GROUPS_IN_FLAX: dict[Any, Group] = {"bias": "vector", "scale": "vector", "embedding": "embedding"}


def param(
    rngs: nnx.Rngs,
    init: Init,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    group: Group | None = None,
) -> nnx.Param:
    """Return a float32 parameter with its logical axes.

    `axes` has one name (or None) per dimension. The optimiser treats parameters by `group` (`Model.groups`). None
    selects `default_group`; pass a group if the default is wrong, as for a bias of [heads, width].
    """
    assert len(shape) == len(axes), f"{len(shape)} dimensions, {len(axes)} axis names"
    if group is not None and group not in GROUPS:
        raise UserError(f"group={group!r}: a parameter belongs to one of {', '.join(GROUPS)}.")
    shapes_only = isinstance(rngs, _ShapesOnly)
    value = jnp.zeros(shape, jnp.float32) if shapes_only else init(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, logical_axes=axes, group=group or default_group(axes))


def auxiliary(module: Module) -> Module:
    """Move all parameters of a module to the group `auxiliary`, and return the module.

    Only a mixer's auxiliary loss trains these parameters (`seqjax.mixers.base.Mixer.call_with_loss`). Their gradients
    are clipped by a separate norm, and weight decay does not apply.
    """
    for _, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        variable.set_metadata(group="auxiliary")
    return module


def default_group(axes: tuple[str | None, ...]) -> Group:
    """Return the default group for a parameter with these logical axes.

    The axis of stacked layers is not included. One-dimensional arrays are vectors. A `conv` axis holds convolution
    taps. A `vocab` or `positions` axis belongs to an embedding or head. A `state` axis holds a value per channel and
    state entry, hence vectors. All other arrays are matrices or stacks of matrices.
    """
    if len(axes) < 2 or "state" in axes:
        return "vector"
    if "conv" in axes:
        return "convolution"
    return "embedding" if {"vocab", "positions"} & {*axes} else "matrix"


class Template:
    """The structure of the module `build(rngs, layer)`; `layer` may be traced."""

    def __init__(self, build: Build):
        self._build = build
        module = nnx.eval_shape(lambda: build(_ShapesOnly(params=0), 0))
        self._graph, self._state = nnx.split(module)
        self.shapes: Params = nnx.to_pure_dict(self._state)
        variables = nnx.to_flat_state(self._state)
        self.axes: Params = _nested({path: _axes_of(variable) for path, variable in variables})
        self.groups: Params = _nested({path: _group_of(path, variable) for path, variable in variables})

    def init(self, key: PRNGKey, layer: Any = 0) -> Params:
        """Return fresh parameters."""
        return nnx.to_pure_dict(nnx.state(self._build(nnx.Rngs(params=key), layer)))

    def init_stacked(self, key: PRNGKey, layers: Array) -> Params:
        """Return the parameters of `layers` (indices), stacked along axis 0."""
        return jax.vmap(self.init)(jax.random.split(key, len(layers)), layers)

    def bind(self, params: Params) -> Any:
        """Return the module over `params`; cheap, for use inside a trace."""
        # A merge copies the structure, which leaves the template's state unchanged.
        state = jax.tree.map(lambda x: x, self._state)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self._graph, state)


def _axes_of(variable: Any) -> tuple[str | None, ...]:
    # Parameters of other libraries' layers, such as nnx.Linear, have no axes: they are replicated.
    axes = variable.get_metadata("logical_axes", None)
    return (None,) * len(variable.shape) if axes is None else axes


def _group_of(path: tuple[Any, ...], variable: Any) -> Group:
    group = variable.get_metadata("group", None)
    return group or _GROUPS_IN_FLAX.get(path[-1]) or default_group(_axes_of(variable))


def _nested(leaves: Mapping[tuple[Any, ...], Any]) -> Params:
    tree: Params = {}
    for path, leaf in leaves.items():
        node: Any = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def stacked_axes(axes: Params) -> Params:
    """Return the logical axes of stacked layers, each with 'layers' prepended."""
    return jax.tree.map(lambda a: ("layers", *a), axes, is_leaf=is_axes)


def unstack(params: Params, n_layers: int) -> list[Params]:
    """Return the layers of a stack, one dict each.

    They are cut with `jax.lax.split`; its gradient is one concatenation instead of a sum of padded arrays.
    """
    leaves, tree = jax.tree.flatten(params)
    columns = [[x[0] for x in jax.lax.split(leaf, (1,) * n_layers)] for leaf in leaves]
    return [jax.tree.unflatten(tree, layer) for layer in zip(*columns, strict=True)]


def count(params: Params) -> int:
    """Return the number of elements in a tree of arrays or shapes."""
    return sum(x.size for x in jax.tree.leaves(params))


def names(tree: Params) -> list[tuple[str, Any]]:
    """Return each leaf with its path, as ('blocks.0.mixer.q.w', leaf)."""
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_axes)[0]
    return [(".".join(str(k.key) for k in path), leaf) for path, leaf in flat]


def restricted(params: Params, names_of: Params) -> Params:
    """Return the part of a tree with the names of another tree."""
    return {
        key: restricted(params[key], value) if isinstance(value, dict) else params[key]
        for key, value in names_of.items()
    }


def updated(params: Params, part: Params) -> Params:
    """Return a tree with the arrays of `part` in place of those with the same names."""
    return params | {
        key: updated(params[key], value) if isinstance(value, dict) else value for key, value in part.items()
    }


def fingerprint(params: Params) -> str:
    """Return the SHA-256 of all arrays in name order.

    All processes must call it.
    """
    content = hashlib.sha256()
    for name, x in sorted(names(params)):
        content.update(f"{name}{x.shape}{x.dtype}".encode())
        if jax.process_count() > 1:
            x = multihost_utils.process_allgather(x, tiled=True)
        content.update(np.ascontiguousarray(jax.device_get(x)).data)
    return content.hexdigest()
