"""Convert text shards to token blocks: `prepare` and the command `seqjax prepare`."""

from seqjax.data.layout import Layout
from seqjax.data.prepare.run import prepare

__all__ = ["Layout", "prepare"]
