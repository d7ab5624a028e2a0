"""The extras of the tests are in `test-all`, which `make` and CI install, and CI passes over no missing package."""

import importlib.util
import re
import tomllib

import pytest
import yaml

from tests import extras, support

ROOT = support.ROOT
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def contained(extra: str) -> set[str]:
    """The extra and those that it names."""
    found = {extra}
    for requirement in EXTRAS[extra]:
        if named := re.match(r"seqjax\[([\w,-]+)\]", requirement):
            for other in named[1].split(","):
                found |= contained(other)
    return found


def test_all_of_them_are_installed_by_make():
    assert {*extras.EXTRA_OF.values(), "dev"} <= contained("test-all")
    assert {name for name in EXTRAS if name.startswith("test-")} <= contained("test-all")
    assert "-e '.[test-all]'" in MAKEFILE


def test_the_pages_need_the_extra_docs_alone(tmp_path):
    """`make docs` in a new environment; one that has everything is not touched."""
    made = support.run(["make", "--dry-run", "docs", f"VENV={tmp_path / 'new'}"])
    assert made.returncode == 0, made.stderr
    assert re.findall(r"-e '\.\[([\w,-]+)\]'", made.stdout) == ["docs"]
    for name in (".installed-dev", ".installed-docs"):
        (tmp_path / name).touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert "pip" not in support.run(["make", "--dry-run", "docs", f"VENV={tmp_path}"]).stdout


def test_a_missing_package_skips_here_and_fails_in_ci(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else found(name))
    monkeypatch.setenv("CI", "")
    with pytest.raises(pytest.skip.Exception, match=r"needs lm_eval: pip install -e '\.\[test-harness\]'"):
        extras.need("jax", "lm_eval")
    assert extras.mark("lm_eval").args == (True,)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"needs lm_eval: .*test-harness"):
        extras.package("lm_eval")
    assert extras.mark("lm_eval").args == (False,)
    assert extras.package("json").dumps(1) == "1"
    assert extras.lazy("json").dumps(1) == "1"
    assert extras.lacking("jax", "json") is None


def test_no_other_way_to_skip_for_a_package():
    """`importorskip` would pass over a missing package in CI too; it is for modules of seqjax and of Python."""
    for path in (ROOT / "tests").rglob("*.py"):
        for name in re.findall(r"importorskip\(\s*\"([\w.]+)", path.read_text()):
            assert name.startswith("kernels_pallas.") or name == "resource", f"{path}: extras.need({name!r})"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_what_people_run(path):
    jobs = yaml.safe_load(path.read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    targets = [word for step in steps for word in re.findall(r"\bmake ([\w -]+)", step.get("run", ""))]
    assert targets
    for target in " ".join(targets).split():
        assert re.search(rf"^{target}:", MAKEFILE, re.M), f"{path.name}: the Makefile has no {target}"
    for step in steps:
        assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/x@v1")), step
    for job in jobs.values():
        assert job["timeout-minutes"]


def test_the_workflows_cover_the_pythons_that_the_package_names():
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "slow"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert ci["jobs"]["test"]["strategy"]["matrix"]["python"] == named
    for version in named:
        assert (ROOT / "constraints" / f"py{version}.txt").is_file()
