"""The line on the terminal while a run trains."""

import io

from seqjax.terminal import StatusLine, duration


class Progress:
    """Shows the progress of a training run on the terminal."""

    def __init__(self, total: int, *, quiet: bool = False, stream: io.TextIOBase | None = None):
        self._total = total
        self._line = StatusLine(stream=stream, quiet=quiet)

    def update(self, step: int, *, loss: float, tokens_per_s: float, mfu: float | None, eta: float) -> None:
        """Show the progress; `eta` is in seconds."""
        parts = [f"step {step}/{self._total}", f"loss {loss:.3f}", f"{tokens_per_s:,.0f} tokens/s"]
        parts += [f"MFU {mfu:.1%}"] if mfu is not None else []
        self._line.show(" | ".join([*parts, f"ETA {duration(eta)}"]), last=step >= self._total)

    def say(self, text: str) -> None:
        """Print a permanent line above the progress line."""
        self._line.say(text)
