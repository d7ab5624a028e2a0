"""Choose the cases that only `make test-slow` runs, from pytest's report of durations.

    pytest -m "not slow and not gpu" --durations=0 | python -m tests.slow_cases

adds to slow_cases.txt every case of a parametrized test that took over 0.4 s, except for the quickest case of
each test and for tests of every mixer. Lines can be added (a test of over two seconds beside quick ones of the same
code) and removed by hand.
"""

import collections
import re
import sys
from collections.abc import Iterable
from pathlib import Path

FILE = Path(__file__).parent / "slow_cases.txt"
LONG = 0.4  # seconds on an idle machine
ALWAYS = ("tests/mixers/", "tests/models/test_against_numpy.py")  # every mixer: causality, decoding, goldens, equations
CALL = re.compile(r"\s*(?P<seconds>[\d.]+)s call +(?P<case>.*\S)")


def read() -> list[str]:
    """Return the node ids of the slow cases."""
    return FILE.read_text(encoding="utf-8").splitlines()


def long_cases(seconds: dict[str, float]) -> list[str]:
    """Return the cases over `LONG` seconds outside `ALWAYS`, except for the quickest case of each function."""
    by_function = collections.defaultdict(list)
    for case, took in seconds.items():
        if not case.startswith(ALWAYS):
            by_function[case.partition("[")[0]].append((took, case))
    return sorted(case for cases in by_function.values() for took, case in sorted(cases)[1:] if took > LONG)


def durations(report: Iterable[str]) -> dict[str, float]:
    """Return the seconds of each case in pytest's report."""
    return {match["case"]: float(match["seconds"]) for line in report if (match := CALL.fullmatch(line.rstrip("\n")))}


if __name__ == "__main__":
    cases = sorted({*read(), *long_cases(durations(sys.stdin))})
    FILE.write_text("".join(f"{case}\n" for case in cases), encoding="utf-8")
