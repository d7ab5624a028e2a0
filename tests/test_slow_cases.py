"""The list of slow cases: which cases it gets, and that its tests exist."""

import ast
from pathlib import Path

from tests import slow_cases

ROOT = Path(__file__).parent.parent

REPORT = """\
3.20s call     tests/ops/test_x.py::test_long[a]
2.10s call     tests/ops/test_x.py::test_long[b]
9.00s setup    tests/ops/test_x.py::test_long[b]
4.00s call     tests/ops/test_x.py::test_single
4.00s call     tests/ops/test_x.py::test_short[a-['b', 1]]
0.30s call     tests/ops/test_x.py::test_short[b]
4.00s call     tests/mixers/test_x.py::test_mixer[a]
5.00s call     tests/mixers/test_x.py::test_mixer[b]
"""


def test_the_quickest_case_and_tests_of_every_mixer_stay():
    found = slow_cases.long_cases(slow_cases.durations(REPORT.splitlines(keepends=True)))
    assert found == ["tests/ops/test_x.py::test_long[a]", "tests/ops/test_x.py::test_short[a-['b', 1]]"]


def test_listed_tests_exist():
    """A renamed test would otherwise return to the quick tests unseen."""
    names = {case.partition("[")[0] for case in slow_cases.read()}
    existing = set()
    for file in sorted({name.partition("::")[0] for name in names}):
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                existing.add(f"{file}::{node.name}")
    assert names <= existing
