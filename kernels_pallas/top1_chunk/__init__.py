"""Top-1 Chunk attention (arXiv 2505.18522): the selected past chunk and the own chunk, under one softmax."""
