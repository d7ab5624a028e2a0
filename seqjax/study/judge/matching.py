"""Match a mixer's parameter count to the reference's by MLP width.

The parameter count is linear in the width, so two widths determine the matching width. It is rounded to a multiple of
`COARSE`, or `FINE` below the size 110m.
"""

import dataclasses
from typing import NamedTuple

from seqjax.config import Config, MlpConfig, presets
from seqjax.errors import UserError
from seqjax.models import Model, flops

COARSE, FINE = 64, 16
PARAMS, NONE = "params", "none"


class Match(NamedTuple):
    """Hold the MLP width, the resulting parameter count, and the reference's count."""

    width: int
    parameters: int
    reference: int

    @property
    def text(self) -> str:
        """The result in a sentence."""
        off = self.parameters / self.reference - 1
        return (
            f"MLP width {self.width:,} (--match=params): {self.parameters:,} parameters, {off:+.1%} of attention with "
            f"the same block ({self.reference:,})."
        )


def match(text: str, config: Config, reference: Config, *, how: str | None = None) -> Match | None:
    """Return the MLP width that matches a config to its reference.

    The result is None if the config keeps its width.

    Args:
        text: The config as the user wrote it, `FILE_OR_NAME[:ARG]`.
        config: Its settings.
        reference: The reference's settings.
        how: "params" or "none". By default a user's config is matched unless it sets `model.mlp.dim`. A block without
            MLP width and a shipped config keep their width.

    Raises `UserError` for "params" if the block has no MLP or ignores the width.
    """
    if how not in (None, PARAMS, NONE):
        raise UserError(f"--match={how}: it is {PARAMS} or {NONE}.")
    is_default = how is None
    if how == NONE or (is_default and (presets.is_shipped(text.partition(":")[0]) or presets.sets_mlp_dim(text))):
        return None
    grid = FINE if presets.SIZES[config.size].dim < presets.SIZES["110m"].dim else COARSE
    low, high = (parameters(_with(config, width)) for width in (grid, 2 * grid))
    if config.model.mlp.kind == "none" or low == high:
        if is_default:
            return None
        problem = "has no MLP" if config.model.mlp.kind == "none" else "ignores model.mlp.dim"
        raise UserError(f"--match=params: the block of {config.model.mixer_names} {problem}; give --match=none.")
    target = parameters(reference)
    width = grid * max(1, round(1 + (target - low) / (high - low)))
    return Match(width, parameters(_with(config, width)), target)


def parameters(config: Config) -> int:
    """Return the parameter count of a config's model."""
    return flops.n_params(Model(config.model, max_len=config.train.seq_len))


def _with(config: Config, width: int) -> Config:
    mlp: MlpConfig = dataclasses.replace(config.model.mlp, dim=width)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, mlp=mlp))
