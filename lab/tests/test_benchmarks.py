"""Test the help of the one-off benchmarks."""

from tests.benchmarks.test_harness import require_light_help


def test_help_imports_no_heavy_package() -> None:
    require_light_help("lab/benchmarks")
