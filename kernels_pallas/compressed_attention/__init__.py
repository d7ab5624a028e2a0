"""Attention to block means, and the choice of blocks from its weights.

Source: arXiv 2502.11089 (NSA).
"""
