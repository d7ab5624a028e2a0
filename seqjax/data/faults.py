"""What can be wrong with a shard and is counted rather than fatal."""


class BadLineError(Exception):
    """A line or row that holds no document: the message says why, `found` what there is instead; it may be empty."""

    def __init__(self, reason: str, *, found: str = ""):
        super().__init__(reason)
        self.found = found


class TornShardError(Exception):
    """A shard whose data ends early or is damaged; the lines before that point are valid."""
