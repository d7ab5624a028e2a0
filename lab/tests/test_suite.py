"""Test the evaluation suite's report, `python -m lab.suite`."""

import json
import re
import shutil

import pytest

from lab.suite import __main__ as suite
from seqjax.errors import UserError
from tests import support


def run(directory, name, *, losses, needle=None, tasks=None) -> None:
    workdir = directory / name
    (workdir / "harness").mkdir(parents=True)
    (workdir / "run.json").write_text(
        json.dumps({"device": "NVIDIA H200", "devices": 1, "parameters": 1234, "manifest": "30ecc0dec67fcf1f7e"})
    )
    (workdir / "config.json").write_text("{}")
    rows = [{"step": 1, "tokens": 64, "train/loss": 5.0, "seconds": 1.0}]
    rows += [
        {
            "step": step,
            "tokens": 64 * step,
            "train/loss": loss,
            "eval/c4/loss": loss + 1,
            "eval_mean/in_domain/equal": loss,
        }
        for step, loss in enumerate(losses, start=1)
    ]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if needle:
        (workdir / "niah.json").write_text(json.dumps({"lengths": needle}))
    for task, row in (tasks or {}).items():
        result = {
            "seqjax": {"task": task},
            "results": {task: row},
            "n-samples": {task: {"effective": 5}},
            "n-shot": {task: 0},
        }
        (workdir / "harness" / f"{task}.json").write_text(json.dumps(result))


def test_report_shows_results_and_dashes_for_missing_results(tmp_path, capsys) -> None:
    accuracy = {"acc,none": 0.5, "acc_stderr,none": 0.125}
    run(
        tmp_path,
        "a",
        losses=[3.0, 2.0],
        needle={"1024": {"accuracy": 0.25, "samples": 8}},
        tasks={"local_copy": accuracy},
    )
    run(tmp_path, "b", losses=[2.5], needle={"512": {"accuracy": 1.0, "samples": 4}})
    (tmp_path / "recall").mkdir()
    (tmp_path / "recall" / "report.md").touch()
    suite.main([f"--out={tmp_path}"])
    assert "report.md" in capsys.readouterr().out
    page = (tmp_path / "report.md").read_text()
    assert "1 x NVIDIA H200" in page and "30ecc0dec67fcf1f." in page
    assert "| run | parameters | tokens | training | c4 | mean in domain |" in page
    assert "| a | 1,234 | 128 | 2.0000 | 3.0000 | 2.0000 |" in page, "the last evaluation"
    assert "| run | 512 | 1,024 |" in page and "| a | - | 25.0 of 8 |" in page and "| b | 100.0 of 4 | - |" in page
    assert "| local_copy | acc | 0.5 ± 0.12 | - |" in page
    assert "(recall/report.md)" in page
    for name in "ab":
        shutil.rmtree(tmp_path / name)
    suite.main([f"--out={tmp_path}"])
    assert (tmp_path / "report.md").read_text() == page, "runs.json has all data of the report"
    run(tmp_path, "b", losses=[9.0])
    suite.main([f"--out={tmp_path}"])
    again = (tmp_path / "report.md").read_text()
    assert "| a | 1,234 | 128 | 2.0000 |" in again and "| b | 1,234 | 64 | 9.0000 |" in again


def test_text_from_files_is_escaped(tmp_path) -> None:
    texts = ("<script>", "a | b", "$x$", "**a**", "\x1b[2J", "a\n# b")
    for i, text in enumerate(texts):
        run(tmp_path, f"<b>{i}|", losses=[3.0], tasks={f"task{i}": {f"{text},none": 0.5}})
        path = tmp_path / f"<b>{i}|" / "metrics.jsonl"
        path.write_text(path.read_text().replace("eval/c4/", f"eval/{json.dumps(text)[1:-1]}/"))
        for name in ("run.json", f"harness/task{i}.json"):
            path = tmp_path / f"<b>{i}|" / name
            path.write_text(path.read_text().replace("NVIDIA", json.dumps(text)[1:-1]))
    suite.main([f"--out={tmp_path}"])
    page = (tmp_path / "report.md").read_text()
    assert not re.search(r"(?<!\\)[<$]|\x1b|\*\*a\*\*|\n# b", page)
    for table in re.findall(r"(?:^\|.*\n)+", page, re.M):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_link_at_the_report_path_is_replaced(tmp_path) -> None:
    run(tmp_path / "out", "a", losses=[3.0])
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out" / "report.md").symlink_to(tmp_path / "mine")
    suite.main([f"--out={tmp_path / 'out'}"])
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "out" / "report.md").read_text().startswith("# Evaluation suite")


def test_evaluations_without_results_are_left_out(tmp_path) -> None:
    run(tmp_path, "a", losses=[3.0])
    suite.main([f"--out={tmp_path}"])
    page = (tmp_path / "report.md").read_text()
    assert "S-NIAH" not in page and "lm-evaluation-harness" not in page and "recall" not in page


def test_committed_report_is_current(tmp_path) -> None:
    committed = support.ROOT / "lab" / "results" / "suite"
    shutil.copy(committed / "runs.json", tmp_path)
    (tmp_path / "recall").mkdir()
    (tmp_path / "recall" / "report.md").touch()
    suite.main([f"--out={tmp_path}"])
    assert (tmp_path / "report.md").read_bytes() == (committed / "report.md").read_bytes()


def test_run_without_its_parameters_is_refused(tmp_path) -> None:
    run(tmp_path, "a", losses=[3.0])
    path = tmp_path / "a" / "run.json"
    path.write_text(json.dumps({key: x for key, x in json.loads(path.read_text()).items() if key != "parameters"}))
    with pytest.raises(UserError, match=r"run\.json: parameters is missing"):
        suite.main([f"--out={tmp_path}"])


def test_directory_without_runs_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"--out of lab/suite/suite\.sh"):
        suite.main([f"--out={tmp_path}"])
