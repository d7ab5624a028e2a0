"""The parts of the training loop: step, optimiser, checkpoints, metrics, workdir, signals and report."""
