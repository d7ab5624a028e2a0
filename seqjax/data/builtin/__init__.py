"""The corpus in every installation: texts from Python and seqjax's dependencies."""

from seqjax.data.builtin.corpus import open_builtin

__all__ = ["open_builtin"]
