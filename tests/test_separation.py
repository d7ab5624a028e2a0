"""The library opens no file of the lab, the pages or the recorded benchmarks, and its tests none of the lab."""

import ast
import re
from pathlib import Path

import pytest

from tests import separation, support

PACKAGES = ("seqjax", "kernels_pallas", "configs", "colab")
FILES = sorted(path for package in PACKAGES for path in (support.ROOT / package).rglob("*.py"))
# A path into these, alone or as the first part; a sentence may mention one.
INTO = re.compile(r"(\.{0,2}/)*(lab|docs|benchmarks)(/\S*)?")


def paths_into(source: str) -> list[str]:
    """Strings of a module that are paths into the lab, the pages or the benchmarks, and its imports of them."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and INTO.fullmatch(node.value):
            found.append(f"line {node.lineno}: {node.value!r}")
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [
            f"line {node.lineno}: import of {n}" for n in names if n.split(".")[0] in ("lab", "docs", "benchmarks")
        ]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(support.ROOT)))
def test_no_module_names_a_file_outside(path: Path):
    assert paths_into(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    ['open("lab/results/runs.csv")', 'ROOT / "docs" / "x"', 'Path("../benchmarks/results")', "from lab import collect",
     "import benchmarks.train_step", 'f"docs/{name}"'],
)  # fmt: skip
def test_such_a_line_is_found(line: str):
    assert paths_into(f"def f():\n    {line}")


def test_mentions_are_no_paths():
    assert not paths_into('"""See docs/kernels.md."""\nraise ValueError("docs/data.md has the formats")')


@pytest.mark.parametrize("name", ["lab/README.md", "benchmarks/results/train_step.json"])
def test_a_file_of_the_lab_cannot_be_opened(name: str, monkeypatch):
    monkeypatch.chdir(support.ROOT)
    for path in (name, support.ROOT / name, support.ROOT / "docs" / ".." / name):
        assert separation.is_apart(str(path))
        with pytest.raises(separation.OpenedFileOfLabError, match="put this test in lab/tests"):
            Path(path).read_bytes()


def test_other_files_are_not_apart(tmp_path):
    for path in (support.ROOT / "benchmarks" / "train_step.py", tmp_path / "lab" / "x", support.ROOT / "laboratory"):
        assert not separation.is_apart(str(path))
