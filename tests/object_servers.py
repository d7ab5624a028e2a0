"""An object store on loopback (gcp-storage-emulator), in a process that ends with the context."""

import contextlib
import socket
import subprocess
import sys
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
PATIENCE = 60.0  # seconds; a server usually answers within one


class Server(NamedTuple):
    """A bucket, and the environment variables that connect a process to it."""

    url: str
    port: int
    environment: dict[str, str]


@contextlib.contextmanager
def gcs() -> Iterator[Server]:
    """Run the server; skip the test if the emulator or gcsfs is not installed."""
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
    """Connect this process to the server as well."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        clear()
        yield server
    clear()


def clear() -> None:
    """Forget cached clients, which stay connected to an earlier server."""
    store._systems.clear()
    backend.fsspec_backend._get_filesystem.cache_clear()
    with contextlib.suppress(ImportError):
        fsspec.get_filesystem_class("gs").clear_instance_cache()
