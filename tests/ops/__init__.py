"""Tests of seqjax.ops."""
