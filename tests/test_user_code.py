"""User files that seqjax runs: their modules, their errors, and the source of a class."""

import dataclasses
import inspect
import sys

import pytest

from seqjax import user_code
from seqjax.errors import UserError


def run(path, text, name="seqjax_test_file"):
    path.write_text(text)
    return user_code.run(user_code.read(path), name)


def test_a_class_has_the_source_that_was_run(tmp_path):
    text = (
        "from __future__ import annotations\nimport dataclasses\n\n@dataclasses.dataclass\nclass Own:\n    x: int = 3\n"
    )
    module = run(tmp_path / "own.py", text)
    assert dataclasses.asdict(module.Own()) == {"x": 3}
    assert "class Own" in inspect.getsource(module.Own)
    (tmp_path / "own.py").write_text("changed")
    source = user_code.source_of(module.Own)
    assert source is not None and source.content == text.encode()
    assert user_code.is_of(module, source) and user_code.has_run(module.Own)
    del sys.modules["seqjax_test_file"]


def test_local_cell_and_builtin_classes_have_no_file():
    class Inside:
        pass

    cell = {"__name__": "__main__"}
    exec("class Cell:\n    pass\n", cell)
    assert [user_code.source_of(cls) for cls in (Inside, cell["Cell"], int, type("Called", (), {}))] == [None] * 4


@pytest.mark.parametrize(
    ("text", "match"),
    [("x = (\n", r"own\.py, line 1: "), ("\n1 / 0\n", r"own\.py, line 2: ZeroDivisionError"), ("\0", r"own\.py")],
)
def test_an_error_names_its_line_and_leaves_no_module(tmp_path, text, match):
    with pytest.raises(UserError, match=match):
        run(tmp_path / "own.py", text, "seqjax_broken_file")
    assert "seqjax_broken_file" not in sys.modules
    with pytest.raises(UserError, match=r"none\.py"):
        user_code.read(tmp_path / "none.py")
