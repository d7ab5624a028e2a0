"""The segments of a run: a trunk with a constant rate, and the cooldowns that branch off it to the run's ends.

A run whose `train.ends` is empty has one segment, with the paper's linear decay (arXiv 2505.18522, Appendix A). With
ends, the rate stays constant after warm-up along the trunk, and every end has a cooldown of its own over the last
`optim.cooldown` of the steps up to it, linear to `optim.final_lr`. A cooldown starts from the trunk's state and reads
the batches that the trunk reads next, so its end is that of a run which was never meant to be longer (Hägele et al.,
arXiv 2405.18392). Cooldowns of different ends may share steps, since each has a copy of the state.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from seqjax.config import Config

DIRECTORY = "ends"  # in a workdir; holds a directory for each end, named by its step


class Segment(NamedTuple):
    """Steps `begin` + 1 to `end` of a run; a cooldown to an end if `cools`, else a part of the trunk."""

    begin: int
    end: int
    cools: bool

    def directory(self, workdir: Path) -> Path:
        """Return where the segment's files are: of a cooldown to an end its own directory, else the workdir."""
        return end_directory(workdir, self.end) if self.cools else workdir


def end_steps(config: Config) -> list[int]:
    """Return the steps of the run's ends, ascending; [] for a run with one linear decay."""
    return steps_of_shares(config.train.ends, steps=config.train.steps)


def steps_of_shares(ends: Sequence[float], *, steps: int) -> list[int]:
    """Return the steps that are these shares of all `steps`; what reads a run has the shares from its config.json."""
    return [round(share * steps) for share in ends]


def end_directory(workdir: Path, step: int) -> Path:
    """Return where the files of the end after `step` are."""
    return workdir / DIRECTORY / str(step)


def segments(config: Config) -> list[Segment]:
    """Return the segments in training order: each cooldown follows the part of the trunk that it branches off."""
    ends = end_steps(config)
    if not ends:
        return [Segment(0, config.train.steps, cools=False)]
    found, at = [], 0
    for end in ends:
        branch = end - cooldown_steps(config, end)
        found += [Segment(at, branch, cools=False)] if branch > at else []
        found.append(Segment(branch, end, cools=True))
        at = max(at, branch)
    return found


def cooldown_steps(config: Config, end: int) -> int:
    """Return the number of steps of the cooldown that ends after step `end`."""
    return max(1, round(config.optim.cooldown * end))


def rates(config: Config, segment: Segment) -> np.ndarray:
    """Return the learning rate of every step of a segment, float32 [end - begin].

    It rises linearly from lr / warmup to lr in `optim.warmup_steps` steps. A decay would reach `final_lr` one step
    after the last, so that with `final_lr` = 0 the last step still learns.
    """
    optim, steps = config.optim, np.arange(segment.begin, segment.end)
    warmup = max(1, min(optim.warmup_steps, config.train.steps))
    rising = optim.lr * (steps + 1) / warmup
    if config.train.ends and not segment.cools:
        after = np.full(len(steps), optim.lr)
    else:
        peak = segment.begin if segment.cools else warmup
        share = (steps + 1 - peak) / (segment.end + 1 - peak)
        after = optim.lr + (optim.final_lr - optim.lr) * share
    return np.where(steps < warmup, rising, after).astype(np.float32)
