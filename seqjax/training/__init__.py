"""What the training loop is made of: step, optimiser, checkpoints, metrics, workdir, signals, report."""
