"""Imports run one way, read from the source: a cycle or a short cut shows here, not in a year."""

import ast
from pathlib import Path

import pytest

import kernels_pallas

ROOT = Path(__file__).parent.parent

# A module may import seqjax modules of its own layer or below. Packages stand for everything in them.
LAYERS = (
    ("seqjax.escape",),
    ("seqjax", "seqjax.types", "seqjax.utils"),
    ("seqjax.fields", "seqjax.pictures", "seqjax.reading", "seqjax.store"),
    ("seqjax.sharding",),
    ("seqjax.nn", "seqjax.ops"),
    ("seqjax.mixers",),
    ("seqjax.config",),
    # siblings that only what follows may import
    ("seqjax.models", "seqjax.data"),
    ("seqjax.decoding",),
    ("seqjax.training",),
    ("seqjax.convert",),
    ("seqjax.pretrained",),
    # a judge of a mixer checks it first
    ("seqjax.testing",),
    # only the evaluations, which draw as a study does, and the commands import it
    ("seqjax.study",),
    ("seqjax.evals",),
    ("seqjax.commands",),
    # the doors, `python -m`
    ("seqjax.main", "seqjax.evaluate", "seqjax.generate", "seqjax.__main__"),
)
# Modules outside packages: siblings of one layer do not know each other.
SINGLE = {name for layer in LAYERS for name in layer if not (ROOT / name.replace(".", "/")).is_dir()}
FILES = sorted([*(ROOT / "seqjax").rglob("*.py"), *(ROOT / "kernels_pallas").rglob("*.py")])


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path) -> set[str]:
    """Full names of what a file imports, anywhere in it; `from a import b` may mean the module a.b."""
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
def test_imports_run_one_way(path):
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
            if other == "kernels_pallas.cpu_compiler":  # for what a program calls first, before JAX starts
                assert name in ("seqjax.training.dry_run", "seqjax.utils"), f"{name} imports {other}"
                continue
            if other == "kernels_pallas.counting":
                assert unit(name) == "seqjax.testing", f"{name} imports {other}"
                continue
            # `utils` reports what no kernel can run (BackendError), `training` which kernels run.
            allowed = ("seqjax.nn", "seqjax.ops", "seqjax.mixers", "seqjax.training", "seqjax.utils")
            assert unit(name) in allowed, f"{name} imports {other}: kernels are for layers, ops and mixers"


@pytest.mark.parametrize("path", [p for p in FILES if module_name(p).startswith("seqjax.")], ids=module_name)
def test_of_the_kernels_only_what_the_package_exports_is_used(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert not alias.name.startswith("kernels_pallas."), f"{path}:{node.lineno}: {alias.name}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kernels_pallas":
            assert node.module == "kernels_pallas", f"{path}:{node.lineno}: from {node.module}"
            names = {alias.name for alias in node.names} - {"counting", "cpu_compiler"}
            assert names <= set(kernels_pallas.__all__), f"{path}:{node.lineno}: {names}"


def test_the_layers_name_what_exists():
    """A test of the test: files are found, and what they import is understood."""
    units = {unit(module_name(path)) for path in FILES}
    assert {"seqjax.nn", "seqjax.mixers", "seqjax.models", "seqjax.data", "kernels_pallas.backend"} <= units
    assert "seqjax.mixers" in imported(ROOT / "seqjax" / "models" / "language_model.py")
    assert "seqjax.training.workdir" in imported(ROOT / "seqjax" / "training" / "loop.py")
    assert level("seqjax.nn.layers") < level("seqjax.mixers._attention") < level("seqjax.models.language_model")


@pytest.mark.parametrize("path", [p for p in FILES if module_name(p) != "seqjax.nn.params"], ids=module_name)
def test_nnx_only_declares(path):
    """Outside nn/params.py nnx is Module, Param and Rngs; taking modules apart is done in one place."""
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
