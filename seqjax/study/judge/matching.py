"""Match the parameters of a mixer's model to the reference's by the width of its MLP.

The number of parameters is linear in the width, so two widths give the matching one, rounded to a multiple of `COARSE`
or, below the size 110m, of `FINE`.
"""

import dataclasses
from typing import NamedTuple

from seqjax.config import Config, MlpConfig, presets
from seqjax.errors import UserError
from seqjax.models import Model, flops

COARSE, FINE = 64, 16
PARAMS, NONE = "params", "none"


class Match(NamedTuple):
    """The width of the MLP, and the parameters of the mixer's model with it and of the reference's."""

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
    """Return the width that matches a config to its reference, or None if it keeps its own.

    Args:
        text: The config as it was given, `FILE_OR_NAME[:ARG]`.
        config: Its settings.
        reference: The reference's settings.
        how: "params" or "none". By default a user's config is matched if it does not set `model.mlp.dim`; one of a
            block without such a width, and a shipped config, keep theirs.

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
        what = "has no MLP" if config.model.mlp.kind == "none" else "ignores model.mlp.dim"
        raise UserError(f"--match=params: the block of {config.model.mixer_names} {what}; give --match=none.")
    theirs = parameters(reference)
    width = grid * max(1, round(1 + (theirs - low) / (high - low)))
    return Match(width, parameters(_with(config, width)), theirs)


def parameters(config: Config) -> int:
    """Return the number of parameters of a config's model."""
    return flops.n_params(Model(config.model, max_len=config.train.seq_len))


def _with(config: Config, width: int) -> Config:
    mlp: MlpConfig = dataclasses.replace(config.model.mlp, dim=width)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, mlp=mlp))
