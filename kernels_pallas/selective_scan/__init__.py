"""The selective scan of Mamba-1: a decay per channel and state."""
