"""Preparing blocks on a Dask cluster: equal bytes, and errors of the cluster."""

import concurrent.futures
import dataclasses
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import seqjax
from seqjax.data import shards
from seqjax.data.layout import Layout
from seqjax.data.prepare import cluster, progress, run
from seqjax.data.tokenizer import ByteTokenizer
from seqjax.errors import UserError
from seqjax.files import write_json
from seqjax.reading import read_json
from tests import extras

from .conftest import contents, prepared, row, write_corpus, write_shard

dask = extras.package("dask")
distributed = extras.package("distributed")

LOOPBACK: dict[str, Any] = {
    "host": "127.0.0.1",
    "protocol": "tcp://",
    "dashboard_address": "127.0.0.1:0",
    "threads_per_worker": 1,
}


@pytest.fixture(scope="module")
def in_process() -> Iterator[Any]:
    """A scheduler and a one-thread worker in this process, connected by loopback."""
    with distributed.LocalCluster(n_workers=1, processes=False, **LOOPBACK) as local_cluster:
        yield local_cluster


@pytest.fixture
def executor(in_process: Any) -> str:
    """The value of --executor for `in_process`."""
    return f"dask:{in_process.scheduler_address}"


@dataclasses.dataclass(frozen=True)
class Touch:
    """A job that creates an empty file; jobs other than the first wait for `RELEASED`."""

    done: Path
    first: bool = False

    @property
    def name(self) -> str:
        return self.done.name

    def counts(self) -> dict[str, int]:
        return {"source": 3}


RELEASED = threading.Event()


def touch(job: Touch) -> None:
    assert job.first or RELEASED.wait(30)
    job.done.touch()


def die(job: Touch) -> None:
    os._exit(len(job.name))


def needs(tmp_path: Path, source: Path | None = None) -> cluster.Needs:
    """Return the requirements of jobs that read `source`."""
    files = shards.find_shards(str(source)) if source else []
    return cluster.Needs(tmp_path, files, tokenizer="byte", tokenizer_path="", tokenizer_sha256=ByteTokenizer.hash)


def test_cluster_writes_the_same_bytes(tmp_path: Path, executor: str, capsys):
    source = write_corpus(tmp_path / "source", documents=20, shards=2)
    write_shard(source / "train" / "bad.jsonl.zst", [row("c4", "good"), b"{not json\n"])
    local = prepared(source, tmp_path / "local")
    capsys.readouterr()
    assert prepared(source, tmp_path / "remote", executor=executor, workers=0) == local
    assert local["skipped"]["count"] == 1
    assert contents(tmp_path / "remote") == contents(tmp_path / "local")
    log = capsys.readouterr().err
    assert "tokenise 4/4 100%" in log
    assert "M tokens/s" in log
    assert "write 14/14 100%" in log


def test_cluster_holds_out_the_same_documents(tmp_path: Path, executor: str):
    """Documents are held out of the train split only; the test split is unchanged."""
    for split, n in {"train": 400, "test": 60}.items():
        lines = [json.dumps({"text": f"{split} {i} some words"}).encode() + b"\n" for i in range(n)]
        write_shard(tmp_path / "source" / f"{split}.jsonl.zst", lines)
    options: dict[str, Any] = {"layout": Layout(domain="x")}
    local = prepared(tmp_path / "source", tmp_path / "local", **options)
    assert prepared(tmp_path / "source", tmp_path / "remote", executor=executor, workers=0, **options) == local
    documents = {split: of["x"]["documents"] for split, of in local["splits"].items()}
    assert documents["test"] == 60
    assert documents["train"] + documents["validation"] == 400
    assert 1 <= documents["validation"] <= 20
    assert contents(tmp_path / "remote") == contents(tmp_path / "local")


def test_executor_can_change_between_resumes(tmp_path: Path, executor: str):
    source = write_corpus(tmp_path / "source", documents=5, shards=2)
    write_shard(source / "train" / "z_last.jsonl.zst", [b"{not json\n"])
    for name, first, second in (("remote", executor, "local"), ("local", "local", executor)):
        out = tmp_path / name
        with pytest.raises(UserError, match=r"z_last\.jsonl\.zst:1: not JSON"):
            prepared(source, out, strict=True, executor=first, workers=int(first == "local"))
        assert (
            sorted(path.name for path in (out / ".parts").glob("*.json"))[0] == "000000.json"
        )  # the marker was removed
        finished = (out / ".parts" / "000000.json").stat().st_mtime_ns
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "_remove", lambda parts: None)
            prepared(source, out, executor=second, workers=int(second == "local"))
        assert (out / ".parts" / "000000.json").stat().st_mtime_ns == finished
    for name in ("train/c4-00000.array_record", "documents.npz", "manifest.json"):
        assert (tmp_path / "remote" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()


def test_interrupt_cancels_pending_jobs(tmp_path: Path, in_process: Any):
    class Interrupted(progress.Display):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "finished" and value == 1:
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    RELEASED.clear()
    jobs = [Touch(tmp_path / str(index), first=index == 0) for index in range(9)]
    with cluster.connected(in_process.scheduler_address, needs(tmp_path)) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.run(touch, jobs, Interrupted(progress.Progress(), title="", total=0, jobs=9))
        deadline = time.monotonic() + 10
        while in_process.scheduler.tasks or len(in_process.workers[0].state.tasks) > 1:
            assert time.monotonic() < deadline, "the jobs were not cancelled"
            time.sleep(0.01)
        RELEASED.set()
        # The worker has one thread, so jobs that were not cancelled would run before this one.
        display = progress.Display(progress.Progress(), title="", total=0, jobs=1)
        pool.run(touch, [Touch(tmp_path / "last")], display)
        assert display.finished == 1
        assert display.counters.source.value == 3
    assert {path.name for path in tmp_path.iterdir()} - {"1"} == {"0", "last"}  # job 1 may have begun


@pytest.mark.parametrize(
    ("name", "workers", "message"),
    [
        ("spark:10.0.0.1", 0, "--executor=spark:10.0.0.1 "),
        ("dask:", 0, "--executor=dask: "),
        ("dask:10.0.0.1:8786", 2, "--workers .*--executor"),
        ("dask:localhost", 0, "'localhost'; .*dask:HOST:PORT"),
        ("dask:127.0.0.1:1", 0, "--executor=dask:127.0.0.1:1: .*`dask scheduler`"),
        ("dask:WORKER", 0, "--executor=dask:tcp://.* a worker"),
    ],
)
def test_invalid_executor_is_refused(
    corpus_dir: Path,
    tmp_path: Path,
    in_process: Any,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    workers: int,
    message: str,
):
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 0.2)
    name = name.replace("WORKER", next(iter(in_process.scheduler_info["workers"])))
    with pytest.raises(UserError, match=message):
        prepared(corpus_dir, tmp_path / "out", executor=name, workers=workers)
    assert not (tmp_path / "out").exists()


def test_cluster_without_workers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster, "START_SECONDS", 0.2)
    with (
        distributed.LocalCluster(n_workers=0, processes=False, **LOOPBACK) as empty,
        pytest.raises(UserError, match=r"no workers.*`dask worker tcp://.* --nthreads=1`"),
        cluster.connected(empty.scheduler_address, needs(tmp_path)),
    ):
        pass


def test_losing_all_workers_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    for name in ("CHECK_SECONDS", "LOST_SECONDS"):
        monkeypatch.setattr(cluster, name, 0.2)
    display = progress.Display(progress.Progress(), title="", total=0, jobs=1)
    with (
        distributed.LocalCluster(n_workers=1, processes=False, **LOOPBACK) as leaving,
        cluster.connected(leaving.scheduler_address, needs(tmp_path)) as pool,
    ):
        leaving.scale(0)
        with pytest.raises(UserError, match=r"no worker .*tcp://"):
            pool.run(touch, [Touch(tmp_path / "never")], display)
    assert "workers left" in capsys.readouterr().err


def test_missing_dask_names_the_extra(corpus_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UserError, match=r"pip install 'seqjax\[dask\]'"):
        prepared(corpus_dir, tmp_path / "out", executor="dask:127.0.0.1:8786", workers=0)


def test_dask_is_imported_only_for_a_cluster():
    """No seqjax module imports Dask at module level."""
    importing = r"^(import|from) (dask|distributed)\b"
    files = sorted(Path(seqjax.__file__).parent.rglob("*.py"))
    assert [file.name for file in files if re.search(importing, file.read_text(), re.MULTILINE)] == []
    assert any(re.search(importing[1:], file.read_text()) for file in files)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"versions": {"python": "2.7", "seqjax": "x"}},
            r"python \d.* \(here 2.7\), seqjax .* \(here x\)",
        ),
        ({"versions": {"nosuchpackage": "1.0"}}, r"nosuchpackage not .*\(here 1.0\)"),
        ({"sources": [["file:///nowhere/a.jsonl", 5]]}, r"cannot read file:///nowhere/a.jsonl \(FileNotFoundError"),
        ({"sources": [["s5://bucket/a.jsonl", 5]]}, r"cannot read s5://bucket/a.jsonl \(ValueError"),
        ({"sources": [[f"file://{__file__}", 5]]}, r"sees \d+ bytes .* 5: .*--source"),
        ({"tokenizer_sha256": "f" * 64}, r"another tokenizer .*here ffffffffffff\)"),
        ({"tokenizer": "huggingface", "tokenizer_path": "/nowhere"}, "tokenizer: .*/nowhere"),
    ],
)
def test_worker_fault_names_the_requirement(tmp_path: Path, corpus_dir: Path, change: dict[str, Any], message: str):
    marker = tmp_path / "cluster.json"
    cluster.write_marker(marker, needs(tmp_path, corpus_dir))
    written = read_json(marker)
    assert len(written["sources"]) == 4
    assert {"python", "seqjax", "dask", "distributed", "array_record"} == written["versions"].keys()
    write_json(marker, written | change)
    with pytest.raises(UserError, match=f"process {os.getpid()} .* {message}"):
        cluster.run_job(Touch(tmp_path / "done"), function=touch, marker=str(marker))
    assert not (tmp_path / "done").exists()
    write_json(marker, written)
    assert cluster.worker_fault(str(marker)) == ""


def test_workers_without_shared_storage_are_refused(tmp_path: Path, in_process: Any, monkeypatch: pytest.MonkeyPatch):
    """The marker is written elsewhere, so the workers do not see it in --out."""
    write = cluster.write_marker
    monkeypatch.setattr(cluster, "write_marker", lambda path, needs: write(tmp_path / "elsewhere", needs))
    with (
        pytest.raises(UserError, match=f"1 of 1 .* {os.getpid()} .* see .*--out"),
        cluster.connected(in_process.scheduler_address, needs(tmp_path / "out" / ".parts")),
    ):
        pass


class Ended(concurrent.futures.Future):
    """A stand-in for a failed Dask future."""

    status = "error"


def test_killed_worker_error_names_the_job(tmp_path: Path):
    future = Ended()
    future.set_exception(distributed.KilledWorker("run_job-1", None, 3))
    pool = cluster.DaskCluster(None, tmp_path, "127.0.0.1:1")
    with pytest.raises(UserError, match="shard: 4 workers"):
        pool._raise(future, Touch(tmp_path / "shard"))


@pytest.mark.slow
def test_job_that_kills_workers_ends_the_command(tmp_path: Path):
    """Dask restarts workers and gives up after the job killed two of them."""
    display = progress.Display(progress.Progress(), title="", total=0, jobs=1)
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        distributed.LocalCluster(n_workers=1, processes=True, **LOOPBACK) as fragile,
        cluster.connected(fragile.scheduler_address, needs(tmp_path)) as pool,
        pytest.raises(UserError, match="shard: 2 workers"),
    ):
        pool.run(die, [Touch(tmp_path / "shard")], display)
