"""Test `lab.benchmarks.plan` and its table in docs/launch.md."""

import re

import pytest

from lab.benchmarks import plan
from seqjax.errors import UserError
from tests import support


def test_hours_follow_from_the_measured_rate():
    record = {
        "machine": {"device": "NVIDIA H200"},
        "results": {
            "mamba2": {"devices": 1, "tokens_per_s": 1e9},
            "mamba2 fsdp=2": {"devices": 2, "tokens_per_s": 36_000.0},
        },
    }
    same, scaled = plan.rows(record, 1.44e9)
    assert same == "| 8 H200 | mamba2 | 144 | 3 | 22 | 2 measured, times 4 |"  # 10,000 s: 2.78 hours
    assert scaled == "| 8 A100 | mamba2 | 45 | 9 | 70 | estimate by peak, 312 of 989 TFLOP/s |"


def test_docs_contain_the_printed_table(capsys):
    plan.main([])
    printed = capsys.readouterr().out
    assert printed in (support.ROOT / "docs" / "launch.md").read_text()
    assert len(re.findall("TPU", printed)) == 1
    with pytest.raises(UserError, match=r"--record=other\.json .*train_step_1b3_4_devices\.json"):
        plan.main(["--record=other.json"])
