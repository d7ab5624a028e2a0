"""Converts SlimPajama-shaped shards to token blocks: `prepare` and the command `seqjax prepare`."""

from seqjax.data.prepare.run import prepare

__all__ = ["prepare"]
