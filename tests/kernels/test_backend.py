"""Backend choice and argument checks of the public functions.

The tests cover the order of backends, refusals, and the record of used backends.
"""

import ast
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

import kernels_pallas as kp
from kernels_pallas import backend, device, outside, validation
from kernels_pallas.attention.api import ORDER
from kernels_pallas.backend import Backend
from tests.kernels.common import Shape, qkv

# With the tests' import hook, annotations reject a bad shape before the function does.
ERRORS = (ValueError, jaxtyping.TypeCheckError)


def all_calls(implementation):
    q, k, v = qkv(Shape(T=20))
    return {
        "top1_chunk_attention": lambda: kp.top1_chunk_attention(q, k, v, chunk_size=8, implementation=implementation),
        "select_chunk": lambda: kp.select_chunk(q, k, chunk_size=8, implementation=implementation),
        "top1_element_attention": lambda: kp.top1_element_attention(q, k, v, implementation=implementation),
        "top1_chunk_decode": lambda: kp.top1_chunk_decode(
            q[:, 0], k, v, 4, chunk_size=8, implementation=implementation
        ),
        "top1_element_decode": lambda: kp.top1_element_decode(q[:, 0], k, v, 4, implementation=implementation),
    }


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the record of used backends."""
    monkeypatch.setattr(backend, "_used", {})
    monkeypatch.setattr(backend, "_logged", set())


def test_used_backends_are_recorded_and_logged_once(fresh, caplog) -> None:
    assert kp.backends_used() == {}
    with caplog.at_level(logging.INFO, logger="kernels_pallas"):
        for _ in range(2):
            for call in all_calls("xla").values():
                jax.eval_shape(call)  # tracing chooses the backend
    assert kp.backends_used() == dict.fromkeys(all_calls(None), "xla")
    assert sorted(r.getMessage() for r in caplog.records) == sorted(f"{op} runs on xla" for op in all_calls(None))


@pytest.mark.parametrize("op", all_calls(None))
def test_an_unknown_implementation_is_an_error(fresh, op) -> None:
    with pytest.raises(kp.BackendError, match="unknown implementation 'cuda'"):
        all_calls("cuda")[op]()
    if op != "select_chunk" and not op.startswith("top1_chunk_attention"):
        with pytest.raises(kp.BackendError, match=f"{op} .*no pallas"):
            all_calls("pallas")[op]()
    assert kp.backends_used().get(op) is None
    assert issubclass(kp.BackendError, ValueError)


def only_gpu(problem: backend.Problem) -> str | None:
    return None if problem.platform == "gpu" else f"needs a GPU, this is a {problem.platform}"


def never_loaded() -> str:
    pytest.fail("loaded after a refusal")


def test_the_first_backend_that_accepts_runs(fresh, monkeypatch) -> None:
    seen: list[backend.Problem] = []

    def refusal(problem: backend.Problem) -> str | None:
        seen.append(problem)
        return only_gpu(problem)

    monkeypatch.setattr(device, "platform", lambda: "cpu")
    x = jnp.zeros((2, 20, 4, 8))
    backends = (Backend("xla", lambda: "xla"), Backend("triton", never_loaded, refusal))
    assert backend.pick("op", backends, None, (x,), {"chunk_size": 8}) == "xla"
    assert kp.backends_used() == {"op": "xla"}
    assert seen == [backend.Problem("cpu", (jax.ShapeDtypeStruct(x.shape, x.dtype),), {"chunk_size": 8}, False)]
    refused = r"^op .*implementation='triton' .*cpu\. triton: .*GPU.*; pallas: op .*; xla: can run"
    with pytest.raises(kp.BackendError, match=refused):
        backend.pick("op", backends, "triton", (x,), {})
    assert seen[-1].is_named
    assert kp.backends_used() == {"op": "xla"}, "a refusal is no use"


def test_order_leads_and_names(fresh) -> None:
    def long(problem: backend.Problem) -> bool:
        return problem.operands[0].shape[1] >= 20

    backends = (
        Backend("xla", lambda: "xla"),
        Backend("triton", lambda: "triton"),
        Backend("pallas", lambda: "pallas", leads=long),
    )
    long_x, short_x = jnp.zeros((1, 20)), jnp.zeros((1, 19))
    assert backend.pick("op", backends, None, (short_x,), {}) == "triton"
    assert backend.pick("op", backends, None, (long_x,), {}) == "pallas"
    for name in backend.IMPLEMENTATIONS:
        assert backend.pick("op", backends, name, (long_x,), {}) == name
        assert kp.backends_used() == {"op": name}
    with pytest.raises(kp.BackendError, match="any implementation"):
        backend.pick("op", (Backend("triton", never_loaded, lambda problem: "never"),), None, (short_x,), {})


class Counting:
    """Count calls to the xla kernels of Top-1 Element attention.

    They are registered like an external package's backend.
    """

    calls = 0

    def __getattr__(self, name):
        self.calls += 1
        return getattr(kp.top1_element.xla.BACKEND.load(), name)


def test_external_backends_come_first(fresh, monkeypatch) -> None:
    monkeypatch.setattr(backend, "_outside", {})
    kernels = Counting()

    def short(problem: kp.Problem) -> str | None:
        return None if problem.operands[0].shape[1] <= 20 else "only for up to 20 tokens"

    kp.register_backend("top1_element_attention", kp.Backend("mine", lambda: kernels, short))
    q, k, v = qkv(Shape(T=20))
    got = kp.top1_element_attention(q, k, v)
    assert kernels.calls == 1
    assert kp.backends_used() == {"top1_element_attention": "mine"}
    want = kp.top1_element_attention(q, k, v, implementation="xla")
    assert (got == want).all()
    assert kernels.calls == 1
    kp.top1_element_attention(q, k, v, implementation="mine")
    longer = qkv(Shape(T=21))
    kp.top1_element_attention(*longer)
    assert kp.backends_used() == {"top1_element_attention": "xla"}, "it refused"
    with pytest.raises(kp.BackendError, match=r"mine: .* 20 tokens; "):
        kp.top1_element_attention(*longer, implementation="mine")
    with pytest.raises(kp.BackendError, match="implementation 'mine' for select_chunk"):
        kp.select_chunk(q, k, implementation="mine")


def test_a_backend_is_registered_for_an_op_that_exists_under_its_own_name(monkeypatch) -> None:
    monkeypatch.setattr(backend, "_outside", {})
    with pytest.raises(ValueError, match=r"'selectivescan'.*'selective_scan'"):
        kp.register_backend("selectivescan", kp.Backend("mine", never_loaded))
    with pytest.raises(ValueError, match=r"'xla' .*kernels_pallas"):
        kp.register_backend("ssd", kp.Backend("xla", never_loaded))
    for name in ORDER:
        with pytest.raises(ValueError, match=f"'{name}' .*kernels_pallas"):
            kp.register_backend("causal_attention", kp.Backend(name, never_loaded))


def test_every_backend_op_uses_pick() -> None:
    picked = set()
    for path in Path(kp.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "pick":
                assert isinstance(node.args[0], ast.Constant)
                picked.add(node.args[0].value)
    assert tuple(sorted(picked)) == outside.OPS


def test_the_documented_backend_works(monkeypatch) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "add_a_kernel_backend.md").read_text()
    snippet, comparison = re.findall(r"```python\n(.*?)```", page, re.S)
    monkeypatch.setattr(backend, "_outside", {})
    exec(comparison, {})
    exec(snippet, {})
    declared = backend._outside["selective_scan"]["mine"]
    problem = backend.Problem("cpu", (), {})
    assert (declared.refusal(problem), declared.refusal(problem._replace(platform="gpu"))) == ("needs a GPU", None)
    with pytest.raises(ModuleNotFoundError, match="my_kernels"):
        declared.load()


def test_platform_follows_the_default_device() -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        assert device.platform() == "cpu"


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        (((2, 8, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)), r"^k .*key dim .*\(2, 9, 2, 8\)"),
        (((2, 8, 4, 8), (2, 8, 2, 4), (2, 8, 2, 8)), r"^k .*key dim .*\(2, 8, 2, 4\)"),
        (((2, 8, 4, 8), (2, 8, 2, 8), (2, 8, 1, 8)), "^v .*and heads "),
        (((2, 8, 4, 8), (2, 8, 3, 8), (2, 8, 3, 8)), "must divide"),
        (((8, 4, 8), (2, 8, 2, 8), (2, 8, 2, 8)), "got 3 axes"),
        (((2, 0, 4, 8), (2, 0, 2, 8), (2, 0, 2, 8)), "^q .*no time "),
    ],
)
def test_mismatched_shapes_are_named(shapes, match) -> None:
    with pytest.raises(ValueError, match=match):
        validation.check_attention(*shapes)
    q, k, v = (jnp.zeros(shape) for shape in shapes)
    for op in (kp.top1_chunk_attention, kp.top1_element_attention):
        with pytest.raises(ERRORS):
            op(q, k, v)


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        (((2, 4, 8), (3, 9, 2, 8), (3, 9, 2, 8)), r"k cache .*\(3, 9, 2, 8\)"),
        (((2, 4, 8), (2, 9, 2, 8), (2, 8, 2, 8)), "caches disagree"),
        (((2, 4, 8), (2, 9, 3, 8), (2, 9, 3, 8)), "must divide"),
        (((2, 1, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)), "decoding step"),
    ],
)
def test_mismatched_decode_shapes_are_named(shapes, match) -> None:
    with pytest.raises(ValueError, match=match):
        validation.check_decode(*shapes)


def test_unknown_choices_name_the_nearest() -> None:
    q, k, v = qkv(Shape(T=20))
    known = r"Did you mean 'approx'.*Known: exact, best_key, best_key_int8, approx"
    with pytest.raises(ValueError, match=rf"unknown selection 'aprox'\. {known}"):
        kp.top1_chunk_attention(q, k, v, selection="aprox")
    with pytest.raises(ValueError, match="unknown selection"):
        kp.select_chunk(q, k, selection="mean")
    with pytest.raises(ValueError, match=r"v_grad 'Hard'.*'hard'"):
        kp.top1_element_attention(q, k, v, v_grad="Hard")
    for call in (kp.top1_chunk_attention, lambda q, k, v, **o: kp.select_chunk(q, k, **o)):
        with pytest.raises(ValueError, match=r"chunk_size .*0"):
            call(q, k, v, chunk_size=0)


# Allowed imports, plus triton and torch in Triton folders.
ALLOWED = {"jax", "jaxtyping", "kernels_pallas", "numpy"} | set(sys.stdlib_module_names)


def test_the_package_is_a_leaf() -> None:
    root = Path(kp.__file__).parent
    for path in root.rglob("*.py"):
        allowed = ALLOWED | ({"triton", "torch"} if "triton" in path.relative_to(root).parts else set())
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {name.split(".")[0] for name in names} <= allowed, path


def test_backends_and_pick_are_independent() -> None:
    root = Path(kp.__file__).parent
    ops = {path.name for path in root.iterdir() if (path / "api.py").is_file()}
    attentions = {"attention", "compressed_attention", "select_chunk", "top1_chunk", "top1_element"}
    recurrences = {"state_scan", "selective_scan", "ssd", "log_linear", "delta_rule", "kda", "linear_attention"}
    around = {"cross_entropy", "head_norm", "index_loss", "path_attention", "path_walk", "short_conv", "token_shift"}
    before = {"mamba3_operands", "wkv7_operands"}
    assert ops == attentions | recurrences | around | before
    text = (root / "backend.py").read_text()
    assert not any(op in text for op in ops)
    for op in ops:
        assert {"interface.py", "reference.py"} <= {path.name for path in (root / op).iterdir()}
        assert (root / op / "xla.py").is_file() or (root / op / "xla").is_dir()


LEAF = """
import os, sys, warnings
warnings.simplefilter("error")
before = dict(os.environ)
for name in ("seqjax", "flax", "optax", "matplotlib", "triton", "torch", "jax_triton", "absl", "ml_collections"):
    sys.modules[name] = None  # an import of it fails
import kernels_pallas as kp
import jax
assert dict(os.environ) == before, "the import changed the environment"
assert not any(name.startswith("jax.experimental.pallas") for name in sys.modules), "a GPU library was imported"
bridge = sys.modules.get("jax._src.xla_bridge")
assert not bridge.backends_are_initialized(), "the import started JAX"
x = jax.numpy.ones((1, 9, 2, 4))
assert kp.top1_chunk_attention(x, x, x, chunk_size=4).shape == x.shape
assert kp.backends_used() == {"select_chunk": "xla", "top1_chunk_attention": "xla"}
"""


def test_importing_needs_only_jax_and_jaxtyping() -> None:
    """The import emits no warning and leaves the environment unchanged.

    Child processes inherit the environment, and another jaxlib may not understand it.
    """
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "TRITON_INTERPRET")}
    command = [sys.executable, "-c", LEAF]
    done = subprocess.run(command, env=env | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
