"""Text files are UTF-8 in any locale, so reports can contain any character in a container too."""

import ast
import subprocess
import sys

import pytest

from tests import support

PACKAGES = ("seqjax", "kernels_pallas")
TEXT = ("read_text", "write_text", "open")


def without_encoding(source: str) -> list[int]:
    """Return the lines of a module that open a text file without an encoding."""
    lines_without = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        of_module = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in (
            "os",
            "fsspec",
            "archive",
        )
        modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        binary = name == "open" and any("b" in mode for mode in modes)
        if name in TEXT and not of_module and not binary and "encoding" not in [k.arg for k in node.keywords]:
            lines_without.append(node.lineno)
    return lines_without


def test_calls_without_encoding_are_detected():
    lines = ["p.read_text()", "p.open()", "open(p)", "p.open('w')", "p.write_text(x)"]
    assert without_encoding("\n".join(lines)) == [1, 2, 3, 4, 5]
    fine = [
        "p.open('rb')",
        "os.open(p, 3)",
        "archive.open(member)",
        "p.read_text(encoding='utf-8')",
        "p.open('w', encoding='utf-8')",
    ]
    assert without_encoding("\n".join(fine)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_text_file_has_an_encoding(package: str):
    files = sorted((support.ROOT / package).rglob("*.py"))
    assert files
    lines_without = {
        str(path): lines for path in files if (lines := without_encoding(path.read_text(encoding="utf-8")))
    }
    assert not lines_without


def write_umlauts(argv: list[str]) -> None:
    sys.stdout.write("Gr\u00f6\u00dfe\n")


def test_unprintable_characters_are_shown_as_codes():
    code = (
        "from tests.test_encoding import write_umlauts; from seqjax.command_line import run_command; "
        "run_command(write_umlauts, [])"
    )
    environment = support.environment() | {"PYTHONIOENCODING": "ascii"}
    args = [sys.executable, "-c", code]
    result = subprocess.run(args, env=environment, cwd=support.ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "Gr\\xf6\\xdfe\n"), result.stderr
