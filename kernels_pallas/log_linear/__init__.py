"""Log-linear attention with one decay per head (log-linear Mamba-2)."""
