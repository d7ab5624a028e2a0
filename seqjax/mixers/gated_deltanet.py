"""Gated DeltaNet: the delta rule on a state that decays, with an output gate.

S_t = e^{g_t} S_{t-1} + k_t (x) beta_t (v_t - k_t^T e^{g_t} S_{t-1}), y_t = q_t^T S_t (Yang et al., arXiv 2412.06464;
public implementation: flash-linear-attention, `fla/layers/gated_deltanet.py`). At 768 x 12: 6 heads with keys of 96 and
values of 192, SwiGLU of 2048, RMSNorm with eps 1e-6; 123.9M parameters, tied. See `_delta.py`.
"""

import dataclasses

from seqjax.mixers._delta import DeltaConfig, DeltaMixer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DeltaConfig):
    """The settings of Gated DeltaNet; by default keys take 3/4 of the model's width and values twice that."""

    def widths(self, dim: int) -> tuple[int, int]:
        """Return the width of all keys and that of all values, at model width `dim`."""
        key_width = 3 * dim // 4 if self.key_dim is None else self.key_dim
        return key_width, 2 * key_width if self.value_dim is None else self.value_dim


class Mixer(DeltaMixer):
    """The delta rule with decay and output gate."""

    gated = True
