"""The wheel's packages, found in the tree.

pyproject.toml has everything else.

`configs/` is next to the code, because people read and copy it, and is installed as `seqjax.configs`. A wheel also has
the commit of its code, `seqjax/COMMIT`, for run.json.
"""

import subprocess
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

CODE = find_packages(include=["seqjax*", "kernels_pallas*"])
CONFIGS = [f"seqjax.{name}" for name in find_packages(include=["configs*"])]


class BuildWithCommit(build_py):
    """Copies the code and adds the file COMMIT."""

    def run(self) -> None:
        """Build as usual; without git, an existing COMMIT in the source is kept."""
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
