"""PaTH attention to earlier chunks, which transform each query on its way."""
