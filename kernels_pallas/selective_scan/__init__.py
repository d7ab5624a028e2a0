"""Mamba-1's selective scan: one decay per channel and state."""
