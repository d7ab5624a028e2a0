"""Test extras are in `test-all`, which `make` and CI install; CI never skips a missing package."""

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
    """Return the extra and all extras that it includes."""
    included = {extra}
    for requirement in EXTRAS[extra]:
        if named := re.match(r"seqjax\[([\w,-]+)\]", requirement):
            for other in named[1].split(","):
                included |= contained(other)
    return included


def test_make_installs_all_test_extras():
    assert {*extras.EXTRA_OF.values(), "dev"} <= contained("test-all")
    assert {name for name in EXTRAS if name.startswith("test-")} <= contained("test-all")
    assert "-e '.[test-all]'" in MAKEFILE


def test_make_docs_installs_only_the_docs_extra(tmp_path):
    """A complete environment is not changed."""
    made = support.run(["make", "--dry-run", "docs", f"VENV={tmp_path / 'new'}"])
    assert made.returncode == 0, made.stderr
    assert re.findall(r"-e '\.\[([\w,-]+)\]'", made.stdout) == ["docs"]
    for name in (".installed-dev", ".installed-docs"):
        (tmp_path / name).touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert "pip" not in support.run(["make", "--dry-run", "docs", f"VENV={tmp_path}"]).stdout


def test_a_missing_package_skips_locally_and_fails_in_ci(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find_spec(name))
    monkeypatch.setenv("CI", "")
    with pytest.raises(pytest.skip.Exception, match=r"lm_eval: pip install -e '\.\[test-harness\]'"):
        extras.need("jax", "lm_eval")
    assert extras.mark("lm_eval").args == (True,)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"needs lm_eval: .*test-harness"):
        extras.package("lm_eval")
    assert extras.mark("lm_eval").args == (False,)
    assert extras.package("json").dumps(1) == "1"
    assert extras.lazy("json").dumps(1) == "1"
    assert extras.lacking("jax", "json") is None


def test_importorskip_is_not_used_for_packages():
    """In CI it would skip missing packages; it is only for `kernels_pallas` and standard-library modules."""
    for path in (ROOT / "tests").rglob("*.py"):
        for name in re.findall(r"importorskip\(\s*\"([\w.]+)", path.read_text()):
            assert name.startswith("kernels_pallas.") or name == "resource", f"{path}: extras.need({name!r})"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_existing_make_targets(path):
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


def test_workflows_cover_the_declared_python_versions():
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "slow"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    ci = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert ci["jobs"]["test"]["strategy"]["matrix"]["python"] == named
    for version in named:
        assert (ROOT / "constraints" / f"py{version}.txt").is_file()
