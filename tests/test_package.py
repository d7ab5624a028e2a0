"""Contents of an installation: all files of the packages, the configs, the command, and nothing else."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
import yaml

import seqjax
from tests import support

ROOT = support.ROOT
# jax, jaxtyping and what they require. jaxtyping brings wadler_lindig; jaxlib, ml_dtypes, numpy, opt_einsum and scipy
# are jax's.
KERNELS_NEED = (
    "kernels_pallas", "jax", "jaxlib", "jaxtyping", "wadler_lindig", "ml_dtypes", "numpy", "opt_einsum", "scipy",
)  # fmt: skip
CALL = """
import sys
from tests.import_filter import finders
sys.meta_path[:] = finders(lambda name: name in {allowed})
import jax, jax.numpy as jnp
import kernels_pallas
q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 32, 2, 8))
o = jax.jit(lambda *x: kernels_pallas.top1_chunk_attention(*x, chunk_size=8))(q, k, v)
assert o.shape == (1, 32, 2, 8) and bool(jnp.isfinite(o).all())
grads = jax.grad(lambda *x: kernels_pallas.top1_element_attention(*x).sum(), argnums=(0, 1, 2))(q, k, v)
assert all(bool(jnp.isfinite(g).all()) for g in grads)
try:
    import flax
except ModuleNotFoundError:
    print("alone")
"""


def tree() -> set[str]:
    """Return the files of an installation, by installed path."""
    packages = {"seqjax": "seqjax", "kernels_pallas": "kernels_pallas", "configs": "seqjax/configs"}
    return {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in packages.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".json", ".csv") or path.name == "py.typed"
    }


def test_setup_py_lists_every_package():
    """The packages in setup.py contain every file; nothing is built."""
    code = (
        "import setuptools; setuptools.setup = lambda cmdclass, **kw: print(repr(kw)); "
        "exec(compile(open('setup.py').read(), 'setup.py', 'exec'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    arguments = ast.literal_eval(done.stdout)
    assert arguments["package_dir"] == {"seqjax.configs": "configs"}
    packages = {name.replace(".", "/") for name in arguments["packages"]}
    assert {path.rpartition("/")[0] for path in tree() if path.endswith(".py")} == packages
    assert {
        "seqjax/configs",
        "seqjax/configs/ablations",
        "seqjax/configs/studies",
        "kernels_pallas/top1_chunk/xla",
    } < packages
    assert not {name for name in packages if name.split("/")[0] not in ("seqjax", "kernels_pallas")}, "as the lab"


def test_the_version_and_the_command_have_one_source():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "seqjax.__version__"}
    assert project["project"]["scripts"] == {"seqjax": "seqjax.commands.cli:run"}
    assert project["tool"]["setuptools"]["package-data"] == {
        "seqjax": ["py.typed"],
        "seqjax.evals.lm_eval.local": ["*.yaml"],
        "seqjax.study": ["example/*"],
        "seqjax.training": ["recorded_speeds.json"],
        "kernels_pallas": ["py.typed"],
    }
    literal = f'\n__version__ = "{seqjax.__version__}"\n'
    assert literal in (ROOT / "seqjax" / "__init__.py").read_text(), "setuptools reads it without importing"


def test_the_repository_url_is_the_same_everywhere():
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    notebooks = [f"colab/{path.name}" for path in (ROOT / "colab").iterdir() if path.suffix in (".py", ".ipynb")]
    places = [path for kind in ("*.md", "*.cff", "docs/*.md", ".github/**/*.y*ml") for path in ROOT.glob(kind)]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in [*places, *(ROOT / name for name in notebooks)]}
    texts.pop("CHANGELOG.md")
    urls = {name: set(re.findall(r"https://github\.com/[\w.-]+/seqjax\b", text)) for name, text in texts.items()}
    assert all(urls[name] for name in ("CITATION.cff", "docs/quickstart.md", *notebooks))
    assert {name: addresses for name, addresses in urls.items() if addresses - {address}} == {}


def test_the_software_is_the_preferred_citation():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    preferred = cited["preferred-citation"]
    assert (preferred["type"], preferred["title"]) == ("software", cited["title"])
    (paper,) = cited["references"]
    assert paper["identifiers"][0]["value"] == "arXiv:2505.18522"


def test_release_commands_match_the_release_page():
    page, script = (ROOT / "docs" / "release.md").read_text(), (ROOT / ".ci" / "release").read_text()
    commands = re.findall(r"^ +(seqjax .*)$", page, re.M)
    assert len(commands) == 4
    for command in commands:
        assert f"  run {command}\n" in script


def test_core_dependencies():
    """A new dependency must be added here on purpose (scipy comes with jax)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [text.partition(">")[0] for text in project["dependencies"]]
    assert names == [
        "absl-py", "array_record", "flax", "fsspec", "grain", "jax", "jaxtyping", "matplotlib", "ml_collections",
        "numpy", "optax", "orbax-checkpoint", "scipy", "tensorboardX", "zstandard",
    ]  # fmt: skip


@pytest.mark.slow
def test_kernels_need_only_jax_and_jaxtyping(tmp_path):
    code = CALL.format(allowed=KERNELS_NEED)
    env = {**support.environment(), "PYTHONPATH": str(ROOT)}
    done = support.run([sys.executable, "-c", code], env=env, cwd=tmp_path)
    assert done.stdout == "alone\n", done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel offline from a copy, so the tree stays clean."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("seqjax", "kernels_pallas", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    (copy / "configs" / "written_yesterday.py").write_text((copy / "configs" / "transformer.py").read_text())
    (copy / "seqjax" / "COMMIT").write_text("abc\n")
    code = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, cwd=copy, check=False)
    assert done.returncode == 0, done.stderr
    return next(out.glob("seqjax-*.whl"))


@pytest.mark.slow
def test_the_wheel_contains_the_tree(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
        info = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "seqjax = seqjax.commands.cli:run" in archive.read(info).decode()
        assert archive.read("seqjax/COMMIT") == b"abc\n"
    assert files == tree() | {"seqjax/configs/written_yesterday.py", "seqjax/COMMIT"}
    assert f"-{seqjax.__version__}-" in wheel.name


@pytest.mark.slow
def test_the_wheel_works_outside_the_clone(wheel, corpus_cache, tmp_path):
    """Unpack the wheel and run it in an empty directory with this environment's dependencies."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    env = {**support.environment(), "PYTHONPATH": str(site)}

    def seqjax_command(*args):
        command = [sys.executable, "-c", "import sys; from seqjax.commands.cli import run; run()", *args]
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=empty, check=False)

    where = "import seqjax, kernels_pallas, seqjax.configs.top1_chunk as c; print(seqjax.__file__, c.__file__)"
    code = where + "; from seqjax import presets; from seqjax.training import dry_run; print(presets.directories())"
    code += "; print(dry_run.SPEEDS.is_file())"
    urls = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=empty, check=True)
    assert urls.stdout.count(str(site)) == 3, urls.stdout
    assert str(ROOT) + os.sep + "configs" not in urls.stdout
    assert urls.stdout.endswith("True\n"), "recorded speeds are installed"
    short = f"train.steps=2,data.cache_dir={corpus_cache},log.sample_tokens=0"
    done = seqjax_command("train", f"--config=top1_chunk:debug,{short}")
    assert done.returncode == 0, done.stderr
    (run,) = (empty / "runs").iterdir()
    assert (run / "report.md").is_file()
    mine = "from seqjax import presets\n\ndef get_config(arg=''):\n"
    (empty / "mine.py").write_text(mine + "    return presets.get_config(arg, name='mine', base='written_yesterday')\n")
    done = seqjax_command("train", f"--config=mine.py:debug,{short}", "--workdir=mine")
    assert done.returncode == 0, done.stderr
    done = seqjax_command("evaluate", "--workdir=mine", "--tokens=128")
    assert done.returncode == 0, done.stderr
    assert "prose" in done.stdout
