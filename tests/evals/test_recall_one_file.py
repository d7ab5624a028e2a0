"""A new recall task needs one file: no other file changes, and the tests of other tasks pass."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from seqjax.training.origin import RULES
from tests import support

# Quick tests that read every task, module or page.
TESTS = (
    "tests/evals/test_recall.py",
    "tests/evals/test_recall_tasks.py",
    "tests/test_docs.py",
    "tests/test_imports.py",
    "tests/test_package.py",
)


@pytest.mark.slow
def test_docs_task_needs_one_file(tmp_path: Path) -> None:
    """In a copy of the repository, docs/recall.md's task is listed, tested, trained and reported."""
    tree, out = support.copy_tree(tmp_path / "tree"), tmp_path / "out"
    page = (support.ROOT / "docs" / "recall.md").read_text().partition("## A task of your own")[2]
    parity = page.split("```")[1].replace("steps=400", "steps=3")
    (tree / "seqjax" / "evals" / "recall" / "tasks" / "parity.py").write_text(parity)

    def run(*arguments: str) -> str:
        command, environment = [sys.executable, "-m", *arguments], os.environ | {"PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
        return done.stdout

    assert "copy, parity, s5," in " ".join(run("seqjax.evals.recall", "--help").split())
    committed = support.ROOT / "tests" / "golden" / "recall"  # size demo
    out.mkdir()
    # The committed results have earlier training rules, and the command does not extend such results.
    lines = [json.loads(line) for line in (committed / "runs.jsonl").read_text().splitlines()]
    (out / "runs.jsonl").write_text("".join(json.dumps(line | {"rules": RULES}) + "\n" for line in lines))
    run("seqjax.evals.recall", "--size=demo", "--tasks=parity", "--models=Transformer++", f"--out={out}")
    report = (out / "report.md").read_text()
    assert re.findall(r"^## (\w+)", report, re.M) == ["mqar", "induction", "parity", "s5"]
    section = report[report.index("## parity: the parity of the ones so far") : report.index("## s5")]
    assert "| Transformer++ | 32 |" in section and "Guessing: 50%. Trained for 3 steps" in section
    assert report.replace(section, "") == (committed / "report.md").read_text()
    output = run("pytest", "-q", "-p", "no:cacheprovider", "-rA", "-m", "not slow and not gpu", *TESTS)
    assert re.search(r"PASSED .*test_task_contract\[parity-demo\]", output)
