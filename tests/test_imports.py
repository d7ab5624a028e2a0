"""Imports follow the layers below, read from the source; cycles and shortcuts fail."""

import ast
from pathlib import Path

import pytest

import kernels_pallas

ROOT = Path(__file__).parent.parent

# A module may import seqjax modules of its own layer or below. Packages stand for everything in them.
LAYERS = (
    ("seqjax.escape",),
    ("seqjax", "seqjax.types", "seqjax.errors"),
    ("seqjax.terminal",),
    ("seqjax.files",),
    ("seqjax.command_line", "seqjax.fields", "seqjax.pictures", "seqjax.reading", "seqjax.store"),
    ("seqjax.sharding", "seqjax.user_code"),
    ("seqjax.nn", "seqjax.ops"),
    ("seqjax.mixers",),
    ("seqjax.config",),
    # siblings; only later layers may import them
    ("seqjax.models", "seqjax.data"),
    ("seqjax.decoding",),
    ("seqjax.training",),
    ("seqjax.convert",),
    ("seqjax.pretrained",),
    # `judge` runs these checks first
    ("seqjax.testing",),
    # imported by the commands and by evaluations, which use its figures
    ("seqjax.study",),
    ("seqjax.evals",),
    ("seqjax.commands",),
    # entry points, `python -m`
    ("seqjax.main", "seqjax.evaluate", "seqjax.generate", "seqjax.__main__"),
)
# Modules outside packages; siblings in a layer do not import each other.
SINGLE = {name for layer in LAYERS for name in layer if not (ROOT / name.replace(".", "/")).is_dir()}
FILES = sorted([*(ROOT / "seqjax").rglob("*.py"), *(ROOT / "kernels_pallas").rglob("*.py")])


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> set[str]:
    """Return the full names of a file's imports; `from a import b` may mean the module a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            here = ROOT.joinpath(*(node.module or "").split("."))
            for alias in node.names:
                is_module = (here / alias.name).is_dir() or (here / f"{alias.name}.py").is_file()
                names.add(f"{node.module}.{alias.name}" if is_module else str(node.module))
    return names


def unit(name: str) -> str:
    """'seqjax.data.blocks' -> 'seqjax.data'."""
    return ".".join(name.split(".")[:2])


def level(name: str) -> int:
    for i, layer in enumerate(LAYERS):
        if unit(name) in layer:
            return i
    raise AssertionError(f"{name} has no layer: say in {__file__} where it belongs")


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_follow_the_layers(path):
    name = module_name(path)
    for other in imported(path):
        top = other.split(".")[0]
        assert top not in ("configs", "tests", "benchmarks", "launch", "lab", "docs"), f"{name} imports {other}"
        if name.startswith("kernels_pallas"):
            assert top != "seqjax", f"{name} imports {other}: the kernels are a package of their own"
        elif top == "seqjax" and name != "seqjax":
            assert level(other) <= level(name), f"{name} imports {other}, which is above it"
            if level(other) == level(name):
                assert unit(other) == unit(name), f"{name} imports its sibling {other}"
                assert unit(name) not in SINGLE, f"{name} imports {other}"
        elif top == "kernels_pallas":
            if other == "kernels_pallas.cpu_compiler":  # called before JAX starts
                assert name in ("seqjax.training.dry_run", "seqjax.command_line"), f"{name} imports {other}"
                continue
            if other == "kernels_pallas.counting":
                assert unit(name) == "seqjax.testing", f"{name} imports {other}"
                continue
            # `command_line` reports BackendError, and `training` reports the kernels in use.
            allowed = ("seqjax.nn", "seqjax.ops", "seqjax.mixers", "seqjax.training", "seqjax.command_line")
            assert unit(name) in allowed, f"{name} imports {other}: kernels are for layers, ops and mixers"


@pytest.mark.parametrize("folder", ["benchmarks", "colab", "configs", "docs", "tests"])
def test_only_the_lab_imports_the_lab(folder):
    """The lab may import everything."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert "lab" not in [name.split(".")[0] for name in names], f"{path}:{node.lineno} imports the lab"


@pytest.mark.parametrize("path", [p for p in FILES if module_name(p).startswith("seqjax.")], ids=module_name)
def test_only_exported_kernel_names_are_used(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert not alias.name.startswith("kernels_pallas."), f"{path}:{node.lineno}: {alias.name}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kernels_pallas":
            assert node.module == "kernels_pallas", f"{path}:{node.lineno}: from {node.module}"
            names = {alias.name for alias in node.names} - {"counting", "cpu_compiler"}
            assert names <= set(kernels_pallas.__all__), f"{path}:{node.lineno}: {names}"


def test_files_and_imports_are_detected():
    """Checks these tests: files are listed and their imports are parsed."""
    units = {unit(module_name(path)) for path in FILES}
    assert {"seqjax.nn", "seqjax.mixers", "seqjax.models", "seqjax.data", "kernels_pallas.backend"} <= units
    assert "seqjax.mixers" in imported(ROOT / "seqjax" / "models" / "language_model.py")
    assert "seqjax.training.workdir" in imported(ROOT / "seqjax" / "training" / "loop.py")
    assert level("seqjax.nn.layers") < level("seqjax.mixers._attention") < level("seqjax.models.language_model")


@pytest.mark.parametrize("path", [p for p in FILES if module_name(p) != "seqjax.nn.params"], ids=module_name)
def test_nnx_use_is_limited_to_declarations(path):
    """Outside nn/params.py, nnx provides only Module, Param and Rngs; one place splits modules."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nnx":
            assert node.attr in ("Module", "Param", "Rngs"), f"{path}:{node.lineno}: nnx.{node.attr}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flax"):
            assert [alias.name for alias in node.names] == ["nnx"], f"{path}:{node.lineno}"
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("flax") for alias in node.names), f"{path}:{node.lineno}"
    if module_name(path).startswith("kernels_pallas"):
        assert not any(name.startswith("flax") for name in imported(path))


@pytest.mark.parametrize("package", ["data", "training", "study/gaps", "study/judge", "study/report", "study/runs"])
def test_test_files_are_named_after_their_module(package):
    """Names are tests/PACKAGE/test_MODULE.py or test_MODULE_TOPIC.py."""
    modules = {path.stem for path in (ROOT / "seqjax" / package).iterdir() if path.stem != "__init__"}
    for path in (ROOT / "tests" / package).glob("test_*.py"):
        words = path.stem.removeprefix("test_").split("_")
        assert any("_".join(words[: n + 1]) in modules for n in range(len(words))), path.name


def test_the_long_files_exist():
    """Long files start first; a renamed file would start last."""
    from tests.conftest import LONG_FILES

    assert not [name for name in LONG_FILES if not (ROOT / name).is_file()]
