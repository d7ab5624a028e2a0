"""The optimiser, a run's segments (trunk and cooldowns), and learning rates.

The optimiser is Adam as in the paper, with global-norm clipping (arXiv 2505.18522, Appendix A). Alternatives are Muon
and NorMuon (seqjax/training/muon.py) for matrices, with Adam for the other parameters.

A run without `train.ends` has one segment with the paper's linear decay, or with a cosine decay (`optim.schedule`). A
run with ends uses a WSD schedule. The learning rate of the trunk stays constant after warmup. Each end has a cooldown
over the last share `optim.cooldown` of its steps, linear to `optim.final_lr`. A cooldown starts from the trunk's state
and reads the batches that the trunk reads next. Its end therefore equals a run planned with that length (arXiv
2405.18392). Cooldowns to different ends may use the same batches, because each has a copy of the state.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np
import optax

from seqjax.config import Config, OptimConfig
from seqjax.errors import UserError
from seqjax.nn.params import Group
from seqjax.training import muon
from seqjax.types import Array, Params

Rule = Literal["muon", "adam"]
NARROWEST = 64  # smallest side of a matrix that Muon updates
NOT_MATRICES: tuple[Group, ...] = ("vector", "embedding", "convolution")


def optimizer(config: OptimConfig, groups: Params | None = None) -> optax.GradientTransformation:
    """Return the chain: clipping, Adam or Muon, decoupled weight decay, rates, sign.

    Updates are for a learning rate of 1; the training step multiplies them by the rate. With `optim.name` "muon" or
    "normuon", each parameter has the rule of `update_rules`, and updates by Adam are multiplied by `optim.adam_lr` /
    `optim.lr`.

    Weight decay is 0 in the paper. It applies to matrices, by Muon and by Adam, and is multiplied by the parameter's
    learning rate: W <- W - rate (update + weight_decay W). `groups` gives each parameter's group (`Model.groups`); the
    gradients of the group `auxiliary` are clipped separately. With None the rules before groups hold: decay applies to
    every array with more than one axis per layer.

    Raises `UserError` for Muon without groups or without a matrix that is large enough.
    """
    parts = [clip_by_loss(config.clip_norm, groups)] if config.clip_norm is not None else []
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    if config.name == "adam":
        parts.append(adam)
    else:
        parts.append(optax.partition({"muon": _muon(config), "adam": adam}, _rules(config, groups)))
    if config.weight_decay:
        mask = _decay_mask if groups is None else jax.tree.map(lambda group: group == "matrix", groups)
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=mask))
    if config.name != "adam" and config.adam_lr is not None:
        parts.append(_scale_adam(config.adam_lr / config.lr, _rules(config, groups)))
    parts.append(optax.scale(-1.0))
    return optax.chain(*parts)


def _muon(config: OptimConfig) -> optax.GradientTransformation:
    transform = muon.scale_by_muon if config.name == "muon" else muon.scale_by_normuon
    return transform(config.muon_momentum, scale=config.muon_scale)


def _rules(config: OptimConfig, groups: Params | None) -> Callable[[Any], Any]:
    """Return the function from parameters, or their shapes, to the rule of each."""
    if groups is None:
        raise UserError(
            f"config.optim.name={config.name!r} needs parameter groups, and the run in the workdir began without them; "
            "give another --workdir."
        )

    def rules(params: Any) -> Any:
        if not jax.tree.leaves(params):  # optax's placeholder, for the structure of the state
            return params
        by_param = update_rules(groups, params)
        if "muon" not in jax.tree.leaves(by_param):
            raise UserError(
                f"config.optim.name={config.name!r}: no matrix has {NARROWEST} inputs and outputs. Set a larger "
                "config.model.dim, or config.optim.name='adam'."
            )
        return by_param

    return rules


def _scale_adam(factor: float, rules: Callable[[Any], Any]) -> optax.GradientTransformation:
    """Return the transformation that multiplies the updates by Adam with `factor`."""

    def update(updates: Any, params: Any) -> Any:
        del params
        return jax.tree.map(lambda u, rule: u * factor if rule == "adam" else u, updates, rules(updates))

    return optax.stateless(update)


def update_rules(groups: Params, params: Params) -> Params:
    """Return each parameter's rule under Muon, "muon" or "adam".

    Muon updates arrays with two axes per layer, each of at least `NARROWEST`, except vectors, embeddings (with the
    head) and convolutions. `groups` is `Model.groups`; `params` may be shapes. Layers are stacked along the first axis.
    """

    def rule_of(name: str) -> Callable[[Group, Any], Rule]:
        def rule(group: Group, x: Any) -> Rule:
            shape = x.shape[1:] if name == "blocks" else x.shape
            is_matrix = group not in NOT_MATRICES and len(shape) == 2 and min(shape) >= NARROWEST
            return "muon" if is_matrix else "adam"

        return rule

    return {name: jax.tree.map(rule_of(name), groups[name], tree) for name, tree in params.items()}


def _parts_by_loss(tree: Params, groups: Params | None) -> dict[str, list[int]]:
    """Return the indices of the leaves that each loss trains, without empty parts.

    The names are prefixes of metrics: "" for the language loss, "auxiliary_" for the mixers' auxiliary losses.
    """
    leaves = ["" for _ in jax.tree.leaves(tree)] if groups is None else jax.tree.leaves(groups)
    prefixes = ["auxiliary_" if group == "auxiliary" else "" for group in leaves]
    return {name: [i for i, other in enumerate(prefixes) if other == name] for name in sorted({*prefixes})}


def clip_by_loss(clip_norm: float, groups: Params | None) -> optax.GradientTransformation:
    """Clip by global norm, with a separate norm for the group `auxiliary`.

    One norm over all parameters would scale the language model's gradient by the size of the auxiliary losses.
    """
    clip = optax.clip_by_global_norm(clip_norm)

    def update(updates: Any, state: optax.OptState, params: Any = None) -> tuple[Any, optax.OptState]:
        del params
        leaves, tree = jax.tree.flatten(updates)
        for part in _parts_by_loss(updates, groups).values():
            clipped, _ = clip.update({i: leaves[i] for i in part}, optax.EmptyState())
            for i in part:
                leaves[i] = cast(dict[int, Array], clipped)[i]
        return jax.tree.unflatten(tree, leaves), state

    return optax.GradientTransformation(clip.init, update)


def gradient_norms(grads: Params, groups: Params) -> dict[str, Array]:
    """Return the global norm of the gradients of each loss, by its name in the metrics.

    `grad_norm` is the norm for the language loss. A model with auxiliary losses also has `auxiliary_grad_norm`.
    """
    leaves = jax.tree.leaves(grads)
    parts = _parts_by_loss(grads, groups)
    return {f"{prefix}grad_norm": optax.tree.norm([leaves[i] for i in part]) for prefix, part in parts.items()}


def _decay_mask(params: Params) -> Params:
    """Return a mask of the arrays with more than one axis per layer.

    Layers are stacked along the first axis.
    """
    vector_ndim = {name: 2 if name == "blocks" else 1 for name in params}
    return {name: jax.tree.map(lambda x, n=vector_ndim[name]: x.ndim > n, tree) for name, tree in params.items()}


ENDS = "ends"  # in a workdir; holds a directory for each end, named by its step


class Segment(NamedTuple):
    """Steps `begin` + 1 to `end` of a run.

    `is_end` tells a segment that finishes at an end from a trunk segment, after which training continues.
    """

    begin: int
    end: int
    is_end: bool

    @property
    def is_cooldown(self) -> bool:
        """Whether the segment branches off a trunk.

        It is False for the only segment of a run without ends.
        """
        return self.is_end and self.begin > 0

    def directory(self, workdir: str | Path) -> Path:
        """Return the segment's directory: a cooldown's subdirectory, or the workdir."""
        return end_directory(workdir, self.end) if self.is_cooldown else Path(workdir)


def end_steps(config: Config) -> list[int]:
    """Return the steps of the run's ends, ascending.

    Returns [] for a run with one linear decay.
    """
    return steps_of_shares(config.train.ends, steps=config.train.steps)


def steps_of_shares(ends: Sequence[float], *, steps: int) -> list[int]:
    """Return the steps at the shares `ends` of all `steps`.

    Readers of a run take the shares from its config.json.
    """
    return [round(share * steps) for share in ends]


def shares_of_steps(ends: Collection[int], *, steps: int) -> tuple[float, ...]:
    """Return the shortest shares that `steps_of_shares` maps to these steps.

    They are ascending.
    """
    digits = range(1, 18)
    return tuple(next(x for n in digits if round((x := round(end / steps, n)) * steps) == end) for end in sorted(ends))


def end_directory(workdir: str | Path, step: int) -> Path:
    """Return the directory of the end after `step`."""
    return Path(workdir) / ENDS / str(step)


def segments(config: Config) -> list[Segment]:
    """Return the segments in training order.

    Each cooldown follows its part of the trunk.
    """
    if not config.train.ends:
        return [Segment(0, config.train.steps, is_end=True)]
    ordered, begin = [], 0
    for end in end_steps(config):
        branch_step = end - max(1, round(config.optim.cooldown * end))
        ordered += [Segment(begin, branch_step, is_end=False)] if branch_step > begin else []
        ordered.append(Segment(branch_step, end, is_end=True))
        begin = branch_step
    return ordered


def keeps_checkpoint(config: Config, segment: Segment) -> bool:
    """Return whether the last step of a segment is saved.

    Trunk segments always are, because the trunk continues from there. `checkpoint.ends` decides for cooldowns.
    """
    if not segment.is_cooldown:
        return True
    return config.checkpoint.ends == "all" or (config.checkpoint.ends == "last" and segment.end == config.train.steps)


def rates(optim: OptimConfig, segment: Segment, steps: np.ndarray) -> np.ndarray:
    """Return the learning rates of some steps of a segment, float32 with the shape of `steps`.

    It rises linearly from lr / warmup to lr in `optim.warmup_steps` steps. A decay, linear or half a cosine period
    (`optim.schedule`), reaches `final_lr` one step after the last step, so the last step still learns with `final_lr` =
    0. With Muon this is the matrices' rate; Adam's rate has a constant ratio to it.
    """
    warmup = max(1, min(optim.warmup_steps, segment.end))
    peak = max(segment.begin, warmup)  # the last step at the full rate
    progress = (steps - peak) / (segment.end + 1 - peak) if segment.is_end else 0.0
    if optim.schedule == "cosine":
        progress = (1 - np.cos(np.pi * progress)) / 2
    decayed = optim.lr + (optim.final_lr - optim.lr) * progress
    return np.where(steps < warmup, optim.lr * steps / warmup, decayed).astype(np.float32)
