"""The corpus that every installation provides: texts of Python and of seqjax's dependencies."""

from seqjax.data.builtin.corpus import open_builtin

__all__ = ["open_builtin"]
