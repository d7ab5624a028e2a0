"""The packages of the wheel, found in the tree so that none can be forgotten; all else is in pyproject.toml.

`configs/` lies beside the code, because people read and copy it, and is installed as `seqjax.configs`. The measured
speeds of `benchmarks/results` that `--dry_run` reads are installed as `seqjax.recorded`.
"""

from setuptools import find_packages, setup

CODE = find_packages(include=["seqjax*", "kernels_pallas*"])
CONFIGS = [f"seqjax.{name}" for name in find_packages(include=["configs*"])]

setup(
    packages=[*CODE, *CONFIGS, "seqjax.recorded"],
    package_dir={"seqjax.configs": "configs", "seqjax.recorded": "benchmarks/results"},
)
