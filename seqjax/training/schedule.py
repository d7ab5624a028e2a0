"""The optimiser, the segments of a run and its learning rates: a trunk, and the cooldowns that branch off it.

The optimiser is Adam as in the paper, with global-norm clipping (arXiv 2505.18522, Appendix A).

A run whose `train.ends` is empty has one segment, with the paper's linear decay. With ends, the rate stays constant
after warm-up along the trunk, and every end has a cooldown of its own over the last `optim.cooldown` of the steps up to
it, linear to `optim.final_lr`. A cooldown starts from the trunk's state and reads the batches that the trunk reads
next, so its end is that of a run planned with that length (arXiv 2405.18392). Cooldowns to different ends may take the
same batches, since each has its own copy of the state.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax

from seqjax.config import Config, OptimConfig
from seqjax.types import Params


def optimizer(config: OptimConfig, groups: Params | None = None) -> optax.GradientTransformation:
    """Return the chain of clipping, Adam, decoupled weight decay (0 in the paper) and the sign.

    Its updates are those of a learning rate of 1; the training step multiplies them by the rate that it is given.
    Weight decay applies to matrices; `groups` is the group of every parameter (`Model.groups`). None is the rule of
    runs that began without groups: decay applies to every array with more than one axis per layer.
    """
    parts = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm is not None else []
    parts.append(optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps))
    if config.weight_decay:
        mask = _with_axes if groups is None else jax.tree.map(lambda group: group == "matrix", groups)
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=mask))
    parts.append(optax.scale(-1.0))
    return optax.chain(*parts)


def _with_axes(params: Params) -> Params:
    """Return a mask of the arrays with more than one axis per layer; layers are stacked along the first axis."""
    vector_ndim = {name: 2 if name == "blocks" else 1 for name in params}
    return {name: jax.tree.map(lambda x, n=vector_ndim[name]: x.ndim > n, tree) for name, tree in params.items()}


ENDS = "ends"  # in a workdir; holds a directory for each end, named by its step


class Segment(NamedTuple):
    """Steps `begin` + 1 to `end` of a run; its end is an end of the run, or the trunk continues after it."""

    begin: int
    end: int
    is_end: bool

    @property
    def is_cooldown(self) -> bool:
        """Whether it branches off a trunk; the only segment of a run without ends does not."""
        return self.is_end and self.begin > 0

    def directory(self, workdir: str | Path) -> Path:
        """Return the directory of the segment's files: its own for a cooldown, else the workdir."""
        return end_directory(workdir, self.end) if self.is_cooldown else Path(workdir)


def end_steps(config: Config) -> list[int]:
    """Return the steps of the run's ends, ascending; [] for a run with one linear decay."""
    return steps_of_shares(config.train.ends, steps=config.train.steps)


def steps_of_shares(ends: Sequence[float], *, steps: int) -> list[int]:
    """Return the steps that are these shares of all `steps`; readers of a run take the shares from its config.json."""
    return [round(share * steps) for share in ends]


def shares_of_steps(ends: Collection[int], *, steps: int) -> tuple[float, ...]:
    """Return the shortest shares of `steps` that `steps_of_shares` turns into these steps, ascending."""
    digits = range(1, 18)
    return tuple(next(x for n in digits if round((x := round(end / steps, n)) * steps) == end) for end in sorted(ends))


def end_directory(workdir: str | Path, step: int) -> Path:
    """Return the directory of the end after `step`."""
    return Path(workdir) / ENDS / str(step)


def segments(config: Config) -> list[Segment]:
    """Return the segments in training order: each cooldown follows the part of the trunk that it branches off."""
    if not config.train.ends:
        return [Segment(0, config.train.steps, is_end=True)]
    found, at = [], 0
    for end in end_steps(config):
        branch = end - max(1, round(config.optim.cooldown * end))
        found += [Segment(at, branch, is_end=False)] if branch > at else []
        found.append(Segment(branch, end, is_end=True))
        at = branch
    return found


def keeps_checkpoint(config: Config, segment: Segment) -> bool:
    """Return whether the last step of a segment is saved: the trunk goes on from it, `checkpoint.ends` names ends."""
    if not segment.is_cooldown:
        return True
    return config.checkpoint.ends == "all" or (config.checkpoint.ends == "last" and segment.end == config.train.steps)


def rates(optim: OptimConfig, segment: Segment, steps: np.ndarray) -> np.ndarray:
    """Return the learning rate of each of some steps of a segment, float32 of the shape of `steps`.

    It rises linearly from lr / warmup to lr in `optim.warmup_steps` steps. A decay reaches `final_lr` one step after
    the last, so that with `final_lr` = 0 the last step still learns.
    """
    warmup = max(1, min(optim.warmup_steps, segment.end))
    peak = max(segment.begin, warmup)  # the last step at the full rate
    share = (steps - peak) / (segment.end + 1 - peak) if segment.is_end else 0.0
    after = optim.lr + (optim.final_lr - optim.lr) * share
    return np.where(steps < warmup, optim.lr * steps / warmup, after).astype(np.float32)
