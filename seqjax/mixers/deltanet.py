"""DeltaNet: linear attention whose state is corrected towards each value by the delta rule.

S_t = S_{t-1} + k_t (x) beta_t (v_t - k_t^T S_{t-1}), y_t = q_t^T S_t (Yang et al., arXiv 2406.06484; public
implementation: flash-linear-attention, `fla/layers/delta_net.py`). At 768 x 12: 8 heads of 96, SwiGLU of 2048, RMSNorm
with eps 1e-6; 109.7M parameters, tied. See `_delta.py`.
"""

import dataclasses

from seqjax.mixers._delta import DeltaConfig, DeltaMixer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DeltaConfig):
    """The settings of DeltaNet; keys and values are as wide as the model by default."""


class Mixer(DeltaMixer):
    """The delta rule without decay or output gate."""

    gated = False
