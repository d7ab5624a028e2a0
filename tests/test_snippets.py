"""Code in README and docs: every Python block runs, and every `seqjax` command parses.

A block that cannot run here has a comment above it, `<!-- not run: needs a GPU -->`. Commands are only parsed; settings
of commands that name a shipped config are checked as well.
"""

import contextlib
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import seqjax
from seqjax import command_line
from seqjax.commands import cli, train
from seqjax.config import from_config_dict, presets
from tests import support
from tests.end_to_end.conftest import write_checkpoint

ROOT = support.ROOT
PAGES = sorted(["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
FENCE = re.compile(
    r"(?P<mark><!-- not run: [^>]+ -->\n+)?^(?P<indent> *)```(?P<kind>[\w{}:-]*)\n(?P<text>.*?)^ *```$", re.M | re.S
)
# Blocks that another test runs: page -> (number of blocks, test file).
ELSEWHERE = {
    "README.md": (2, "tests/end_to_end/test_outside_mixer.py"),
    "docs/add_a_mixer.md": (7, "tests/end_to_end/test_flat_file.py"),
    "docs/add_a_kernel_backend.md": (2, "tests/kernels/test_backend.py"),
}
WRONG_ON_PURPOSE = {"docs/troubleshooting.md"}  # tests/test_troubleshooting.py runs its commands
# Configs that the reader writes, and placeholders for configs.
PLACEHOLDERS = ("NAME", "NAME_OR_FILE", "configs/x.py", "/path/to/my_config.py", "ema", "./gema.py", "./gated_ema.py")


def blocks(page: str) -> list[re.Match]:
    return list(FENCE.finditer((ROOT / page).read_text()))


def execute(matches: list[re.Match], page: str) -> None:
    """Run a page's blocks in order, in one namespace with seqjax; skip marked blocks."""
    space = {"seqjax": seqjax}
    for block in matches:
        if not block["mark"]:
            exec(compile(block["text"], page, "exec"), space)


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page, blocks_dir, tmp_path, monkeypatch):
    """The directory has `runs/first`, as after the quickstart's first command."""
    matches = [block for block in blocks(page) if block["kind"] == "python"]
    if page in ELSEWHERE:
        count, place = ELSEWHERE[page]
        assert len(matches) == count, f"{place} runs {count} blocks of {page}; it has {len(matches)} now"
        name = Path(page).name
        assert re.search(rf"{name}", (ROOT / place).read_text()), f"{place} does not read {page}"
        return
    if any("runs/first" in block["text"] for block in matches):
        write_checkpoint(tmp_path / "runs" / "first", support.run_config(blocks_dir), 1)
    monkeypatch.chdir(tmp_path)
    execute(matches, page)


def test_marked_blocks_are_skipped():
    fails = "```python\n1 / 0\n```\n"
    execute(list(FENCE.finditer(f"<!-- not run: needs a GPU -->\n{fails}")), "a page")
    with pytest.raises(ZeroDivisionError):
        execute(list(FENCE.finditer(f"```python\nx = 1\n```\nand then\n\n{fails}")), "a page")


def commands(text: str) -> Iterator[str]:
    """Yield the command lines in a text: `seqjax ...`, also after a path or environment variables."""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.partition("  #")[0].strip().removeprefix("$ ")
        matches = re.match(r"(?:[A-Z_]+=\S+ )*(?:\S+/)?(?:python -m )?(seqjax(?:\.[\w.]+)? .*)", line)
        if matches:
            yield matches[1]


def documented() -> list[tuple[str, str]]:
    """Return every command in pages, config headers and modules, with its file."""
    matches = []
    for page in PAGES:
        if page in WRONG_ON_PURPOSE:
            continue
        text = (ROOT / page).read_text()
        matches += [
            (page, line) for block in blocks(page) if block["kind"] != "python" for line in commands(block["text"])
        ]
        spans = re.findall(r"(?<!`)`(seqjax [^`]+)`(?!`)", FENCE.sub("", text))
        matches += [(page, span.replace("\n", " ")) for span in spans]
    for path in sorted([*(ROOT / "configs").rglob("*.py"), *(ROOT / "seqjax").rglob("*.py")]):
        header = re.match(r'r?"""(.*?)"""', path.read_text(), re.S)
        place = str(path.relative_to(ROOT))
        if header:
            matches += [(place, line.partition("   ")[0]) for line in commands(header[1])]
            matches += [(place, span.replace("\n", " ")) for span in re.findall(r"`(seqjax [^`]+)`", header[1])]
    for path in sorted((ROOT / "colab").glob("*.py")):
        text = path.read_text().replace("\n# ", " ")
        matches += [(f"colab/{path.name}", span) for span in re.findall(r"`(seqjax [^`]+)`", text)]
    return matches


class ParsedError(Exception):
    """A command line was parsed; nothing runs."""


def parse_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command line with its command's parser, and raise the parser's errors."""
    if words[0] in ("--help", "--version"):
        return
    parse = command_line.Parser.parse_args

    def parse_only(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise ParsedError

    with monkeypatch.context() as patch, contextlib.suppress(ParsedError):
        patch.setattr(command_line.Parser, "parse_args", parse_only)
        if words[1:] != ["--help"]:
            module = cli.COMMANDS[words[0]][0] if words[0] in cli.COMMANDS else words[0]
            importlib.import_module(module).main(words[1:])


MODULES = {module.removesuffix(".__main__"): name for name, (module, _) in cli.COMMANDS.items()}


def words_of(line: str) -> list[str]:
    """Return the arguments, with optional `[--name=VALUE]`, the first of `a|b`, and 1 for N."""
    line = re.sub(
        r"\[((?:--|,|:)[^\[\]]*(?:\[[^\]]*\])*[^\[\]]*)\]", lambda m: m[1] if m[1].startswith("--") else "", line
    )
    words = [re.sub(r"\|.*", "", re.sub(r"=N$", "=1", word)) for word in shlex.split(line)]
    return words[1:] if words[0] == "seqjax" else [MODULES.get(words[0], words[0]), *words[1:]]


COMMANDS = documented()


def test_documented_commands_cover_all_commands():
    places = {place for place, _ in COMMANDS}
    assert {"README.md", "docs/quickstart.md", "docs/convert.md", "docs/release.md", "configs/mamba2.py"} <= places
    assert {words_of(line)[0] for _, line in COMMANDS} >= {*cli.COMMANDS}
    assert len(COMMANDS) > 60


@pytest.mark.parametrize("page", sorted({place for place, _ in COMMANDS}))
def test_documented_commands_parse(page, monkeypatch):
    for line in [line for place, line in COMMANDS if place == page]:
        words = words_of(line)
        assert words[0] in cli.COMMANDS or words[0].startswith(("--", "seqjax.")), line
        if not any(word.startswith("-") for word in words):
            continue  # a mention of a command
        try:
            parse_command(words, monkeypatch)
        except Exception as error:
            pytest.fail(f"{page}: {line}\n{error}")


@pytest.mark.parametrize("page", sorted({place for place, line in COMMANDS if line.startswith("seqjax train -")}))
def test_settings_in_documented_commands_exist(page):
    for line in [line for place, line in COMMANDS if place == page and line.startswith("seqjax train -")]:
        remaining, overrides = train.split_overrides(words_of(line)[1:])
        name = next((word.partition("=")[2] for word in remaining if word.startswith("--config=")), "...")
        if name.partition(":")[0] in PLACEHOLDERS or "..." in name:
            continue
        foreign = [pair for pair in overrides if pair[1].startswith(("my_package.", "gema.py")) or pair[0] == "a.b"]
        from_config_dict(presets.read_config(name, [pair for pair in overrides if pair not in foreign]))
