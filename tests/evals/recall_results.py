"""Make results of `seqjax recall` without training, for tests of their readers."""

import json
from pathlib import Path
from typing import Any

from seqjax.evals.recall import report
from seqjax.evals.recall.setups import SETUPS

SMALL = SETUPS["small"]


def result(model: str, task: str, accuracy: float, *, rate=1e-3, seed=0, **more: Any) -> dict[str, Any]:
    """Return a result line with equal numbers in all tests."""
    setup = SMALL.task(task)
    test = {"accuracy": accuracy, "whole": 0.0, "bits": 1.0, "score": accuracy}
    common = {"model": model, "task": task, "asked": SMALL.settings_hash(task), "dim": 128, "rate": rate, "seed": seed}
    common |= {"parameters": 1000, "chance": setup.floor, "state": dict.fromkeys(setup.tests, 8), "seconds": 1.0}
    return common | {"tests": {name: dict(test) for name in setup.tests}, "validation": test} | more


def write_results(directory: Path, lines: list[dict[str, Any]]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / report.RESULTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory
