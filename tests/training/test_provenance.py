"""Run metadata: versions, devices and the commit."""

import json
import subprocess

import jax

from seqjax.training.provenance import commit_of, run_metadata


def test_run_metadata_identifies_the_run():
    metadata = json.loads(json.dumps(run_metadata(manifest="abc")))
    assert metadata["manifest"] == "abc"
    assert metadata["versions"]["jax"] == jax.__version__
    assert metadata["devices"] == jax.device_count()
    assert "commit" in metadata


def test_commit_comes_from_the_package_repository_only(tmp_path):
    """The commit comes from the package's repository or its COMMIT file, never from an enclosing project."""

    def git(*args):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *args]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "seqjax"
    package.mkdir()
    (package / "a.py").write_text("a = 1\n")
    assert commit_of(package) == ""
    (package / "COMMIT").write_text("abc\n")
    assert commit_of(package) == "abc"
    git("init", "-q")
    git("add", "seqjax/a.py")
    git("commit", "-q", "-m", "first")
    assert commit_of(package) == git("rev-parse", "HEAD")
    (package / "a.py").write_text("a = 2\n")
    assert commit_of(package) == git("rev-parse", "HEAD") + "-dirty"
    installed = tmp_path / ".venv" / "site-packages" / "seqjax"
    installed.mkdir(parents=True)
    assert commit_of(installed) == ""
