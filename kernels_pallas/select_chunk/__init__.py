"""Select the past chunks that each query reads in Top-1 Chunk attention.

Source: arXiv 2505.18522.
"""
