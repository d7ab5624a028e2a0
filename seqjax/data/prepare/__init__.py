"""Converts SlimPajama-shaped shards to token blocks: `prepare` and the command `python -m seqjax.data.prepare`."""

from seqjax.data.prepare.run import prepare

__all__ = ["prepare"]
