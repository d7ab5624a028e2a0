"""Mamba-2's recurrence: state space duality (SSD) with one decay per head."""
