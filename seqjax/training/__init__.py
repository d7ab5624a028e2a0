"""The training loop and its parts: step, optimiser, checkpoints, metrics, workdir, report."""
