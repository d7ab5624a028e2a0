"""Two files add a mixer, as in docs/add_a_mixer.md.

No other file changes, and all tests pass.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import support

# Quick tests that cover all mixers, all configs or the documentation pages.
LOOK = (
    "tests/test_configs.py",
    "tests/test_presets.py",
    "tests/test_imports.py",
    "tests/test_public_names.py",
    "tests/test_package.py",
    "tests/test_docs.py",
    "tests/test_dry_run.py",
    "tests/test_snippets.py",
    "tests/end_to_end/test_golden_losses.py",
    "tests/mixers/test_base.py",
    "tests/mixers/test_standalone.py",
    "tests/models/test_against_numpy.py",
    "tests/models/test_entropy.py",
    "tests/models/test_initial_values.py",
    "tests/models/test_param_counts.py",
    "tests/models/test_settings.py",
)


@pytest.mark.slow
def test_two_files_add_a_mixer(tmp_path: Path):
    """In a copy, the page's mixer passes the contract.

    The tests that cover all mixers pass as well.
    """
    tree = support.copy_tree(tmp_path / "tree")
    page = "docs/add_a_mixer.md"
    (tree / "seqjax/mixers/ema.py").write_text(support.page_block(page, "class Ema("))
    (tree / "configs/ema.py").write_text(support.page_block(page, 'name="ema"'))

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
        return done.stdout

    ran = run("tests/mixers/test_contract.py", "-k", "ema", "-rA")
    for check in ("a_token_changes_nothing_before_it", "step_equals_the_parallel_form", "flops_against_xla"):
        assert re.search(rf"PASSED .*{check}.*\[ema-", ran), check
    run("-m", "not slow and not gpu", *LOOK)
