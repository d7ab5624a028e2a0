"""Which recall task foretells the losses of a study: `python -m lab.foretell`."""
