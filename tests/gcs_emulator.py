"""gcp-storage-emulator with features that tensorstore needs: `python -m tests.gcs_emulator start ...`.

Reads return the object's generation, and conditional writes check it. Without the generation, tensorstore cannot write
an object twice, as it does if a checkpoint does not fit into one commit.

Every connection has its own thread. In the emulator's single thread, a client stopped during a request would block all
others.
"""

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Any

from gcp_storage_emulator import __main__ as emulator
from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

plain_download, plain_insert = objects.download, objects.insert


def generation(storage: Any, bucket: str, name: str) -> str:
    """Return the object's generation, or "0" if it does not exist."""
    try:
        return str(storage.get_file_obj(bucket, name)["generation"])
    except NotFound:
        return "0"


def download(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
    plain_download(request, response, storage, *args, **kwargs)
    current = generation(storage, request.params["bucket_name"], request.params["object_id"])
    if current != "0":
        response["x-goog-generation"] = current


def insert(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
    expected = request.query.get("ifGenerationMatch")
    if expected:
        name = request.query["name"][0] if "name" in request.query else request.data["meta"]["name"]
        if generation(storage, request.params["bucket_name"], name) != expected[0]:
            response.status = HTTPStatus.PRECONDITION_FAILED
            response.json({"error": {"code": 412, "message": "conditionNotMet", "errors": []}})
            return
    plain_insert(request, response, storage, *args, **kwargs)


LOCK = threading.Lock()  # the emulator's storage is not thread-safe


def serialised(handler: Callable[..., None]) -> Callable[..., None]:
    """Return a handler that waits for the complete request and then for the lock."""

    def handle(request: Any, response: Any, *args: Any, **kwargs: Any) -> None:
        _ = request.data
        with LOCK:
            handler(request, response, *args, **kwargs)

    return handle


def main() -> None:
    """Run the emulator."""
    ours = {plain_download: download, plain_insert: insert}
    objects.download, objects.insert = download, insert  # other handlers call these
    for _, handlers in server.HANDLERS:
        for method, handler in handlers.items():
            handlers[method] = serialised(ours.get(handler, handler))
    ThreadingHTTPServer.daemon_threads = True
    server.server.HTTPServer = ThreadingHTTPServer
    emulator.main()


if __name__ == "__main__":
    main()
