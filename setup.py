"""The packages of the wheel, found in the tree so that none can be forgotten; all else is in pyproject.toml.

`configs/` lies beside the code, because people read and copy it, and is installed as `seqjax.configs`. A wheel also has
the commit of its code, `seqjax/COMMIT`, which runs record.
"""

import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

CODE = find_packages(include=["seqjax*", "kernels_pallas*"])
CONFIGS = [f"seqjax.{name}" for name in find_packages(include=["configs*"])]


class BuildWithCommit(build_py):
    """Copies the code, and writes its commit beside it."""

    def run(self) -> None:
        """Build as usual; without git, a file COMMIT of the source is kept."""
        super().run()
        here, name = Path(__file__).parent, "COMMIT"
        commit = (here / "seqjax" / name).read_text() if (here / "seqjax" / name).is_file() else ""
        if (here / ".git").exists():
            command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
            done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
            commit = done.stdout or commit
        if commit and not self.editable_mode:
            (Path(self.build_lib) / "seqjax" / name).write_text(commit)


setup(
    cmdclass={"build_py": BuildWithCommit},
    packages=[*CODE, *CONFIGS],
    package_dir={"seqjax.configs": "configs"},
)
