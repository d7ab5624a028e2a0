"""Short depthwise causal convolution, with optional SiLU and L2 norm per head."""
