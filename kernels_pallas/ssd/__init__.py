"""Mamba-2's recurrence with one decay per head (state space duality)."""
