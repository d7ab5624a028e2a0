"""Simulate missing packages, to test that code works without them."""

import sys
from collections.abc import Callable
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from typing import Any


class Filter:
    """An import finder for the packages that `allows(top-level name)` accepts."""

    def __init__(self, allows: Callable[[str], bool]):
        self._allows = allows

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return PathFinder.find_spec(name, path, target) if self._allows(name.partition(".")[0]) else None

    def find_distributions(self, *args: Any) -> Any:
        return PathFinder.find_distributions(*args)  # metadata of installed packages

    def invalidate_caches(self) -> None:
        PathFinder.invalidate_caches()


def finders(allows: Callable[[str], bool]) -> list[Any]:
    """Return a `sys.meta_path` that finds only these packages and the standard library."""

    def known(name: str) -> bool:
        return name in sys.stdlib_module_names or name.startswith("_sysconfigdata") or allows(name)

    return [BuiltinImporter, FrozenImporter, Filter(known)]
