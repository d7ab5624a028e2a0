"""Which past chunk each query selects: the routing of Top-1 Chunk attention (arXiv 2505.18522)."""
