"""Measure each model's gap to a reference at equal in-domain loss and equal learning rate."""

from seqjax.study.gaps.rates import rates, shown_runs
from seqjax.study.gaps.rows import Row, comparable, compare, estimates, require_model, with_copies

__all__ = ["Row", "comparable", "compare", "estimates", "rates", "require_model", "shown_runs", "with_copies"]
