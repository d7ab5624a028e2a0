"""The documents of a shard, and an account of the lines that hold none."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from seqjax.data import shards, slimpajama
from seqjax.data.progress import count
from seqjax.errors import UserError

MAX_NAMED = 100  # skipped lines that a shard names; all are counted


class Skipped:
    """Lines that were left out: counted by reason, the first ones named."""

    def __init__(self, name: str, *, strict: bool = False):
        self.name, self.strict = name, strict
        self.reasons: Counter[str] = Counter()
        self.first: list[dict[str, Any]] = []

    def add(self, line: int, reason: str, *, detail: str = "") -> None:
        """Note a line; raises `UserError` if strict."""
        why = f"{reason}: {detail}" if detail else reason
        if self.strict:
            raise UserError(
                f"{self.name}:{line}: {why}. Mend the file, or run without --strict to skip and count such lines."
            )
        self.reasons[reason] += 1
        if len(self.first) < MAX_NAMED:
            self.first.append({"file": self.name, "line": line, "reason": why})

    def report(self) -> dict[str, Any]:
        """Counts and the first lines, for a manifest."""
        return {
            "count": self.reasons.total(),
            "by_reason": dict(sorted(self.reasons.items())),
            "first": self.first,
        }


def documents(shard: shards.Shard, domains: tuple[str, ...], skipped: Skipped) -> Iterator[tuple[str, str]]:
    """(domain, text) of the good lines of the wanted domains; the others go to `skipped`."""
    wanted = frozenset(domains)
    all_wanted = wanted == frozenset(slimpajama.NAMES)
    number = 0
    try:
        for number, line in enumerate(shards.read_lines(shard, on_read=lambda n: count(source=n)), start=1):
            if not all_wanted and (named := shards.set_name(line)) is not None and named not in wanted:
                continue
            try:
                domain, text = shards.parse(line, default=shard.domain)
            except shards.BadLineError as error:
                skipped.add(number, str(error))
                continue
            if domain in wanted:
                yield domain, text
    except shards.TornShardError as error:
        skipped.add(number + 1, "torn shard", detail=f"{error}; the lines before it were kept")
