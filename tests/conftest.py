"""What every test runs under: eight CPU devices, checked shapes and types, tiny data on disk.

`SEQJAX_TEST_GPU=1` leaves the accelerator visible; tests marked `gpu` are skipped, with the reason, where none is.
"""
# ruff: noqa: E402 - the order of the imports is the point of this file

import collections
import gc
import importlib.metadata
import itertools
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from absl import logging

ON_GPU = os.environ.get("SEQJAX_TEST_GPU") == "1"
# Before jax is imported: it reads these once. Eight devices so that a mesh can be tested anywhere; without LLVM's
# optimisation the tests, which compile thousands of small programs and hardly run them, take half the time.
if not ON_GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: its decorator looks once
wanted = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    # Cutting a small module into parts for threads, which the workers of xdist keep busy anyway, takes a fifth longer.
    "--xla_cpu_parallel_codegen_split_count=1",
    # what commands set (kernels_pallas/cpu_compiler.py): tests that call functions get the same programs
    "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
]
# The MLIR emitters of fusions take a third of what is left. Later versions have no others, and refuse the flag.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    wanted.append("--xla_cpu_use_fusion_emitters=false")
given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(filter(None, [given, *(flag for flag in wanted if flag.split("=")[0] not in given)]))

# Compiled programs are kept for the session: tests of different files, workers of xdist and the processes that tests
# start compile the same steps. JAX keys them by program, flags and version. A directory that the environment already
# names is used and left as it is.
OWN_CACHE = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if OWN_CACHE:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="seqjax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jaxtyping

import tests.typecheck  # noqa: F401 - the hook looks for its attribute `check`

ROOT = Path(__file__).parent.parent


def _checked_modules() -> list[str]:
    """Every module of the two packages, but Triton's (source text for another compiler) and those of the data.

    The data modules speak of bytes and numpy, through protocols that cannot be checked at run time.
    """
    files = [path for package in ("seqjax", "kernels_pallas") for path in (ROOT / package).rglob("*.py")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files if path.name != "__init__.py"]
    return sorted(name for name in names if "triton" not in name and not name.startswith("seqjax.data"))


# Before seqjax is imported: annotations such as Float[Array, "B T D"] are checked at every call.
jaxtyping.install_import_hook(_checked_modules(), "tests.typecheck.check")

import jax
import pytest
from flax import nnx

from seqjax import store
from seqjax.training import mirrors, report
from tests import object_servers, separation, slow_cases, support

# Here a small program is compiled in less time than it is written; the processes that tests start share all of theirs.
if os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS") == "0":
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _next_key(self: nnx.RngStream) -> jax.Array:
    """The keys of nnx, without its slow way to count, a quarter of the time in which the tests build models.

    `count[...] += 1` asks a traced number for its sharding; for the error's text JAX searches the program so far.
    """
    key = jax.random.fold_in(self.key[...], self.count[...])
    self.count.set_value(self.count[...] + 1)
    return key


nnx.RngStream.__call__ = _next_key


def pytest_report_header() -> str:
    return f"jax {jax.__version__} on {jax.device_count()} x {jax.devices()[0].device_kind}"


def pytest_collection_finish() -> None:
    """Traced programs are many objects that stay: looking for garbage among all of them takes 5 % of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure() -> None:
    if OWN_CACHE:  # not in a worker of xdist, which inherited it
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


# Files of few tests that take long, the longest first. xdist would start files of many tests first, and at the end the
# other workers would wait for one of these.
LONG_FILES = [
    f"tests/{name}.py"
    for name in (
        "end_to_end/test_ends", "kernels/test_triton_compiles", "data/test_builtin", "end_to_end/test_outside_mixer",
        "end_to_end/test_resume", "study/test_study", "end_to_end/test_run_errors", "test_testing",
        "end_to_end/test_processes", "end_to_end/test_train", "convert/test_transformers", "end_to_end/test_generate",
        "benchmarks/test_train_step", "data/test_sources_tfds", "test_dry_run", "end_to_end/test_evaluate",
        "evals/test_harness_command", "benchmarks/test_kernels", "test_package", "end_to_end/test_commands",
    )
]  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    separation.enforce(config.args)
    if hasattr(config.option, "loadscopereorder"):  # of xdist, which may not be installed
        config.option.loadscopereorder = False


def sort_files(items: list[pytest.Item]) -> None:
    """Put the files in the order in which workers are to start them: `LONG_FILES`, then those of many tests."""
    file_of = {item: item.nodeid.partition("::")[0] for item in items}
    n_tests = collections.Counter(file_of.values())
    place = {name: i for i, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: (place.get(file_of[item], len(place)), -n_tests[file_of[item]]))


def mark_items(items: list[pytest.Item]) -> None:
    long_cases = set(slow_cases.read())
    for item in items:
        if item.nodeid in long_cases:
            item.add_marker(pytest.mark.slow)
        values = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if (values.get("mixer"), values.get("variant")) in support.SLOW:
            item.add_marker(pytest.mark.slow)
    has_cuda = any(device.platform in ("gpu", "cuda") for device in jax.devices())
    if has_cuda:
        return
    why = "needs a CUDA device: SEQJAX_TEST_GPU=1 on a machine that has one"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # marks before `-m` looks at them, order of what it leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    mark_items(items)
    yield
    if hasattr(config, "workerinput"):  # a worker of xdist
        sort_files(items)


@pytest.fixture(autouse=True)
def verbosity() -> Iterator[None]:
    """Commands that run in this process set what absl logs, for the rest of the process."""
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)


@pytest.fixture(scope="module", autouse=True)
def undrawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """A report's picture is an empty file, but in the tests that look at it: drawing takes longer than a test's run."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.name.endswith(("test_train.py", "test_report.py")):
            patch.setattr(report, "_plot", lambda path, *args: path.write_bytes(b""))
        yield


MAPS = Path("/proc/self/maps")  # on Linux
MOST_MAPS, TESTS_BETWEEN = 30_000, 25
_finished = itertools.count(1)


def pytest_runtest_logfinish() -> None:
    """Drop compiled programs before there are too many.

    Each holds some nine mappings of memory on a CPU, of which a process may have 65,530 (vm.max_map_count); with one
    more the next compilation ends in a segmentation fault.
    """
    if next(_finished) % TESTS_BETWEEN == 0 and MAPS.is_file() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def blocks_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared blocks of seven tiny domains; shared, so never written to."""
    return support.write_blocks(tmp_path_factory.mktemp("blocks"))


@pytest.fixture(scope="session")
def corpus_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One place for the built-in corpus, which takes seconds to build: `config.data.cache_dir` of tests that need it.

    The workers of xdist share it. SEQJAX_TEST_CACHE keeps it from one run of the tests to the next.
    """
    if given := os.environ.get("SEQJAX_TEST_CACHE"):
        return given
    own = tmp_path_factory.getbasetemp()
    cache = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "corpus"
    cache.mkdir(exist_ok=True)
    return str(cache)


# -------------------------------------------------------------------------------------------------------------- stores
@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of this test's own, as on a machine that has not seen a store; a store that fails is not tried again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "RETRY_SECONDS", ())
    monkeypatch.setattr(mirrors, "_copies", {})
    return tmp_path / "cache"


@pytest.fixture
def memory(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty place in fsspec's store in memory, where files of runs may be, but no checkpoints."""
    monkeypatch.setattr(store, "WORKDIRS", ("gs", "memory"))
    root = f"memory://{uuid.uuid4().hex}"
    yield root
    fs, path = store.filesystem(root)
    if fs.exists(path):
        fs.rm(path, recursive=True)


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[object_servers.Server]:
    with object_servers.gcs() as server:
        yield server


@pytest.fixture
def server(gcs_server: object_servers.Server, own_cache: Path) -> Iterator[object_servers.Server]:
    """A server that this process uses, with the URL of an empty place of its own."""
    with object_servers.used(gcs_server):
        yield gcs_server._replace(url=f"{gcs_server.url}/{uuid.uuid4().hex}")


@pytest.fixture
def heeded() -> Iterator[None]:
    """An interrupt is not ignored, as it is in what a shell starts with "&", children included."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
