"""A short depthwise causal convolution over time, with SiLU and an L2 norm per head where they follow."""
