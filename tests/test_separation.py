"""The library opens no file in lab, docs or recorded benchmarks; library tests open no file in lab."""

import ast
import re
from pathlib import Path

import pytest

from tests import separation, support

PACKAGES = ("seqjax", "kernels_pallas", "configs", "colab")
FILES = sorted(path for package in PACKAGES for path in (support.ROOT / package).rglob("*.py"))
# A string that is a path into these; sentences may mention a path.
INTO = re.compile(r"(\.{0,2}/)*(lab|docs|benchmarks)(/\S*)?")


def paths_into(source: str) -> list[str]:
    """Return a module's strings that are paths into lab, docs or benchmarks, and its imports from these."""
    tree = ast.parse(source)
    references = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and INTO.fullmatch(node.value):
            references.append(f"line {node.lineno}: {node.value!r}")
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        references += [
            f"line {node.lineno}: import of {n}" for n in names if n.split(".")[0] in ("lab", "docs", "benchmarks")
        ]
    return references


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(support.ROOT)))
def test_no_module_names_a_lab_docs_or_benchmark_path(path: Path):
    assert paths_into(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    ['open("lab/results/runs.csv")', 'ROOT / "docs" / "x"', 'Path("../benchmarks/results")', "from lab import collect",
     "import benchmarks.train_step", 'f"docs/{name}"'],
)  # fmt: skip
def test_paths_and_imports_are_detected(line: str):
    assert paths_into(f"def f():\n    {line}")


def test_mentions_in_sentences_are_allowed():
    assert not paths_into('"""See docs/kernels.md."""\nraise ValueError("docs/data.md has the formats")')


@pytest.mark.parametrize("name", ["lab/README.md", "benchmarks/results/train_step.json"])
def test_lab_files_cannot_be_opened(name: str, monkeypatch):
    monkeypatch.chdir(support.ROOT)
    for path in (name, support.ROOT / name, support.ROOT / "docs" / ".." / name):
        assert separation.is_apart(str(path))
        with pytest.raises(separation.OpenedFileOfLabError, match=re.escape(Path(name).name)):
            Path(path).read_bytes()


def test_other_files_can_be_opened(tmp_path):
    for path in (support.ROOT / "benchmarks" / "train_step.py", tmp_path / "lab" / "x", support.ROOT / "laboratory"):
        assert not separation.is_apart(str(path))
