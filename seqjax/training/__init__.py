"""The training loop and its parts, such as step, checkpoints and metrics."""
