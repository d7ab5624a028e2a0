"""Commands in the guides run at a small size, in order and in one directory; the others need a listed resource.

tests/test_snippets.py parses every documented command. Commands in data.md, convert.md, protocol.md and add_a_mixer.md,
and seqjax judge, run in tests/data, convert, study and end_to_end/test_outside_mixer.py.
"""

import re
import sys

import pytest

from tests import support
from tests.end_to_end.test_outside_mixer import SMALL
from tests.test_snippets import documented, words_of

PAGES = (
    "README.md",
    "docs/quickstart.md",
    "docs/faq.md",
    "docs/kernels.md",
    "docs/mixers.md",
    "docs/sharding.md",
    "docs/release.md",
)
NEEDS = {
    "a GPU": r"(?!.*--dry_run)seqjax train .*\b(110m|1b3)\b",
    "SlimPajama": r"seqjax prepare --source=SlimPajama",
    "a package and an account": r"log\.wandb",
    "minutes, or hours of GPUs": r"seqjax (study --(study|configs)=|judge )",
    "options": r"seqjax [\w ]+$",
}


def needed(line: str) -> list[str]:
    return [resource for resource, pattern in NEEDS.items() if re.search(pattern, line)]


COMMANDS = [line for place, line in documented() if place in PAGES]


def test_most_commands_need_no_resources():
    assert sum(not needed(line) for line in COMMANDS) > 12
    for resource in NEEDS:
        assert any(resource in needed(line) for line in COMMANDS), f"no command needs {resource} any more"


@pytest.mark.slow
@pytest.mark.timeout(1200)  # four runs in sequence
def test_the_study_file_in_the_quickstart_runs_unchanged(corpus_cache, tmp_path):
    text = (support.ROOT / "docs" / "quickstart.md").read_text()
    pattern = r"this one,\s`(\w+\.py)`, is complete:\n+```python\n(.*?)```\n+```\n(.*?)\n```"
    ((name, code, line),) = re.findall(pattern, text, re.S)
    assert len(code.splitlines()) <= 20
    (tmp_path / name).write_text(code)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "seqjax").symlink_to(corpus_cache)
    environment = support.environment() | {"PYTHONPATH": str(support.ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = support.run([sys.executable, "-m", "seqjax", *words_of(line)], cwd=tmp_path, env=environment, timeout=1100)
    assert result.returncode == 0, result.stderr
    report = (tmp_path / "runs" / "two" / "results" / "leaderboard.md").read_text()
    assert "**Missing:**" not in report
    assert "| top1_chunk, seed 1 |" in report


@pytest.mark.slow
def test_commands_without_needs_run(corpus_cache, tmp_path):
    (tmp_path / "prompts.txt").write_text("The \ndef \n")
    small = [
        f"--config.{key}={value}"
        for key, value in (SMALL | {"train.seq_len": 128, "data.cache_dir": corpus_cache}).items()
    ]
    environment = support.environment() | {"PYTHONPATH": str(support.ROOT)}
    for line in COMMANDS:
        if needed(line):
            continue
        words = words_of(line)
        if words[0] == "train" and not {"--dry_run", "--help"} & {*words}:
            words += small
        result = support.run([sys.executable, "-m", "seqjax", *words], cwd=tmp_path, env=environment)
        assert result.returncode == 0, f"{line}\n{result.stderr}"
    assert (tmp_path / "runs" / "first" / "report.md").exists()
