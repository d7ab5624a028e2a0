"""Object stores on loopback, as processes that end with the context: moto for S3, gcp-storage-emulator for GCS."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import fsspec
import pytest
from etils.epath import backend

from seqjax import store
from tests import extras

BUCKET = "bucket"
PATIENCE = 60.0  # seconds; a server answers after one


class Server(NamedTuple):
    """A bucket, and the environment that leads a process to the server."""

    url: str
    port: int
    environment: dict[str, str]


@contextlib.contextmanager
def s3() -> Iterator[Server]:
    """Skips the test where moto's server or s3fs is not installed."""
    _require("s3fs", "moto", "flask")
    port = free_port()
    command = [str(Path(sys.executable).parent / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, f"http://127.0.0.1:{port}/moto-api/data.json"):
        server = Server(f"s3://{BUCKET}", port, environment_of_s3(port))
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=PATIENCE).close()
        yield server


def environment_of_s3(port: int) -> dict[str, str]:
    """What leads boto to a server; keys of no meaning, and few attempts."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "2",
    }


@contextlib.contextmanager
def gcs() -> Iterator[Server]:
    """Skips the test where the emulator or gcsfs is not installed."""
    _require("gcsfs", "gcp_storage_emulator")
    port = free_port()
    arguments = ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory", f"--default-bucket={BUCKET}"]
    url = f"http://127.0.0.1:{port}"
    with _running([sys.executable, "-m", "tests.gcs_emulator", *arguments], f"{url}/storage/v1/b"):
        environment = {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "TENSORSTORE_GOOGLE_AUTH_TEST_MODE": "1",
            "NO_GCE_CHECK": "true",
            "GOOGLE_CLOUD_PROJECT": "project",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
        yield Server(f"gs://{BUCKET}", port, environment)


def _require(*packages: str) -> None:
    extras.need(*packages)


@contextlib.contextmanager
def _running(command: list[str], answers: str) -> Iterator[None]:
    root = Path(__file__).parent.parent
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                urllib.request.urlopen(answers, timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, f"{command} ended with {process.returncode}"
                assert time.monotonic() < deadline, f"{command} does not answer"
                time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


@contextlib.contextmanager
def used(server: Server) -> Iterator[Server]:
    """A context in which this process is led to the server too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        clear()
        yield server
    clear()


def clear() -> None:
    """Forget the clients, which keep the server that they were made for."""
    store._systems.clear()
    backend.fsspec_backend._get_filesystem.cache_clear()
    for scheme in ("s3", "gs"):
        with contextlib.suppress(ImportError):
            fsspec.get_filesystem_class(scheme).clear_instance_cache()


class Door:
    """A port that leads to a server while it is open; closed, it refuses, and drops whom it let in."""

    def __init__(self, behind: int):
        self.port, self._behind = free_port(), behind
        self._listening: socket.socket | None = None
        self._through: list[socket.socket] = []

    def open(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._let_in, args=(self._listening,), daemon=True).start()

    def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        for side in self._through:
            with contextlib.suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            side.close()
        self._through.clear()

    def _let_in(self, listening: socket.socket) -> None:
        while True:
            try:
                outside, _ = listening.accept()
            except OSError:
                return
            inside = socket.create_connection(("127.0.0.1", self._behind))
            self._through += [outside, inside]
            for a, b in ((outside, inside), (inside, outside)):
                threading.Thread(target=_carry, args=(a, b), daemon=True).start()


def _carry(a: socket.socket, b: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := a.recv(1 << 16):
            b.sendall(data)
        b.shutdown(socket.SHUT_WR)
