"""Choosing a backend: order, refusals, the record of what ran; and what the public functions refuse."""

import ast
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

import kernels_pallas as kp
from kernels_pallas import checks, dispatch
from tests.kernels.common import Shape, qkv

# under the tests' import hook the annotations refuse a bad shape before the function can
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
    """An empty record and a copy of the table."""
    monkeypatch.setattr(dispatch, "_used", {})
    monkeypatch.setattr(dispatch, "_logged", set())
    monkeypatch.setattr(dispatch, "_backends", {op: dict(table) for op, table in dispatch._backends.items()})


def test_what_ran_is_recorded_and_logged_once(fresh, caplog) -> None:
    assert dispatch.used() == {}
    with caplog.at_level(logging.INFO, logger="kernels_pallas"):
        for _ in range(2):
            for call in all_calls("xla").values():
                jax.eval_shape(call)  # the choice is made while tracing
    assert dispatch.used() == dict.fromkeys(all_calls(None), "xla")
    assert sorted(r.getMessage() for r in caplog.records) == sorted(f"{op} runs on xla" for op in all_calls(None))


@pytest.mark.parametrize("op", all_calls(None))
def test_a_backend_that_does_not_exist_is_an_error_with_every_reason(fresh, op) -> None:
    dispatch._backends = {op: {"xla": table["xla"]} for op, table in dispatch._backends.items()}
    for name in ("triton", "pallas"):
        with pytest.raises(kp.BackendError, match=f"has no {name} kernel") as error:
            all_calls(name)[op]()
        assert f"implementation='{name}' on {dispatch.platform()}" in str(error.value)
        assert "xla: can run this" in str(error.value)
    with pytest.raises(kp.BackendError, match="unknown implementation 'cuda'"):
        all_calls("cuda")[op]()
    assert dispatch.used().get(op) is None
    assert issubclass(kp.BackendError, ValueError)


def test_the_first_backend_that_accepts_runs(fresh) -> None:
    seen: list[dispatch.Problem] = []

    def only_gpu(problem):
        seen.append(problem)
        return None if problem.platform == "gpu" else f"needs a GPU, this is a {problem.platform}"

    def anywhere(problem):
        return None

    q, k, _ = qkv(Shape(T=20))
    dispatch.register("select_chunk", "triton", probe=only_gpu, load=lambda: pytest.fail("loaded after a refusal"))
    if dispatch.platform() != "gpu":
        kp.select_chunk(q, k, chunk_size=8)
        assert dispatch.used()["select_chunk"] == "xla"
        with pytest.raises(kp.BackendError, match="triton: needs a GPU, this is a cpu"):
            kp.select_chunk(q, k, chunk_size=8, implementation="triton")
    assert seen[0].operands[0].shape == q.shape
    assert seen[0].options == {"chunk_size": 8, "selection": "exact"}
    assert dispatch.pick("select_chunk", None, (q, k), {}).__name__.endswith("xla")
    dispatch.register("select_chunk", "pallas", probe=anywhere, load=lambda: "pallas backend")
    assert dispatch.pick("select_chunk", None, (q, k), {}) == "pallas backend"
    assert dispatch.pick("select_chunk", "xla", (q, k), {}).__name__.endswith("xla")


def test_platform_follows_the_default_device() -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        assert dispatch.platform() == "cpu"


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        (((2, 8, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)), "share batch, time and key dim"),
        (((2, 8, 4, 8), (2, 8, 2, 4), (2, 8, 2, 8)), "share batch, time and key dim"),
        (((2, 8, 4, 8), (2, 8, 2, 8), (2, 8, 1, 8)), "share batch, time and heads"),
        (((2, 8, 4, 8), (2, 8, 3, 8), (2, 8, 3, 8)), "must divide"),
        (((8, 4, 8), (2, 8, 2, 8), (2, 8, 2, 8)), "got 3 axes"),
        (((2, 0, 4, 8), (2, 0, 2, 8), (2, 0, 2, 8)), "no time step"),
    ],
)
def test_shapes_that_disagree_are_named(shapes, match) -> None:
    with pytest.raises(ValueError, match=match):
        checks.check_attention(*shapes)
    q, k, v = (jnp.zeros(shape) for shape in shapes)
    for op in (kp.top1_chunk_attention, kp.top1_element_attention):
        with pytest.raises(ERRORS):
            op(q, k, v)


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        (((2, 4, 8), (3, 9, 2, 8), (3, 9, 2, 8)), "share batch and key dim"),
        (((2, 4, 8), (2, 9, 2, 8), (2, 8, 2, 8)), "caches disagree"),
        (((2, 4, 8), (2, 9, 3, 8), (2, 9, 3, 8)), "must divide"),
        (((2, 1, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)), "one decoding step takes"),
    ],
)
def test_decode_shapes_that_disagree_are_named(shapes, match) -> None:
    with pytest.raises(ValueError, match=match):
        checks.check_decode(*shapes)


def test_unknown_choices_name_the_nearest() -> None:
    q, k, v = qkv(Shape(T=20))
    with pytest.raises(ValueError, match=r"unknown selection 'aprox'\. Did you mean 'approx'.*Known: exact, approx"):
        kp.top1_chunk_attention(q, k, v, selection="aprox")
    with pytest.raises(ValueError, match="unknown selection"):
        kp.select_chunk(q, k, selection="mean")
    with pytest.raises(ValueError, match=r"unknown v_grad 'Hard'\. Did you mean 'hard'"):
        kp.top1_element_attention(q, k, v, v_grad="Hard")
    with pytest.raises(ValueError, match="unknown schedule"):
        kp.top1_chunk_attention(q, k, v, schedule="dense")
    for call in (kp.top1_chunk_attention, lambda q, k, v, **o: kp.select_chunk(q, k, **o)):
        with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
            call(q, k, v, chunk_size=0)


def test_the_package_is_a_leaf() -> None:
    root = Path(kp.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] in ("seqjax", "configs") for name in names), path
