"""Top-1 Chunk attention (arXiv 2505.18522).

One softmax over the query's local chunk and the past chunk that it selects.
"""
