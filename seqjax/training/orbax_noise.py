"""Leaves out the tracebacks of a save that failed on Orbax's threads, because the save raises the error as well.

Orbax logs the first error before it raises it. Its other writes end after its event loop has closed: asyncio logs their
errors, and tensorstore tells `sys.unraisablehook` that the loop is closed. On a full disk that is dozens of
tracebacks above the one message that says what to do. That several processes stop together is said by the run as well.
"""

import dataclasses
import logging
import sys
from collections.abc import Callable
from typing import Any

from absl import logging as absl_logging


@dataclasses.dataclass(frozen=True)
class _UnraisableHook:
    shown: Callable[[Any], Any]

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self.shown(unraisable)


def hide() -> None:
    """Leave them out from now on; calling it again changes nothing."""
    for logger in (absl_logging.get_absl_logger(), logging.getLogger("asyncio")):
        logger.addFilter(_is_news)
    if not isinstance(sys.unraisablehook, _UnraisableHook):
        sys.unraisablehook = _UnraisableHook(sys.unraisablehook)


def _is_news(record: logging.LogRecord) -> bool:
    if "orbax" not in record.pathname and "orbax" not in record.getMessage():
        return True
    return not (record.exc_info or "Reached preemption sync point" in record.getMessage())
