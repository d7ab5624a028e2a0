"""The delta rule and gated delta rule: linear attention with error correction."""
