"""The help of the one-off benchmarks."""

from tests.benchmarks.test_harness import require_light_help


def test_help_of_every_script_loads_nothing_heavy() -> None:
    require_light_help("lab/benchmarks")
