"""gcp-storage-emulator with what it leaves out and tensorstore needs: `python -m tests.gcs_emulator start ...`.

A read names the generation of the object, and a write under the condition of a generation looks at it. Without the
first, tensorstore cannot write an object twice, as it does when a checkpoint does not fit into one commit.

It serves every connection by itself: the emulator has one thread, and a client that was stopped in the middle of a
request would keep all others waiting.
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
    """ "0" stands for no object."""
    try:
        return str(storage.get_file_obj(bucket, name)["generation"])
    except NotFound:
        return "0"


def download(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
    plain_download(request, response, storage, *args, **kwargs)
    found = generation(storage, request.params["bucket_name"], request.params["object_id"])
    if found != "0":
        response["x-goog-generation"] = found


def insert(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
    wanted = request.query.get("ifGenerationMatch")
    if wanted:
        name = request.query["name"][0] if "name" in request.query else request.data["meta"]["name"]
        if generation(storage, request.params["bucket_name"], name) != wanted[0]:
            response.status = HTTPStatus.PRECONDITION_FAILED
            response.json({"error": {"code": 412, "message": "conditionNotMet", "errors": []}})
            return
    plain_insert(request, response, storage, *args, **kwargs)


ONE = threading.Lock()  # the emulator's storage is for one request at a time


def one_at_a_time(handler: Callable[..., None]) -> Callable[..., None]:
    """A handler that takes its turn when the whole request is there."""

    def handle(request: Any, response: Any, *args: Any, **kwargs: Any) -> None:
        _ = request.data
        with ONE:
            handler(request, response, *args, **kwargs)

    return handle


def main() -> None:
    """Run the emulator."""
    ours = {plain_download: download, plain_insert: insert}
    objects.download, objects.insert = download, insert  # for its other handlers
    for _, handlers in server.HANDLERS:
        for method, handler in handlers.items():
            handlers[method] = one_at_a_time(ours.get(handler, handler))
    ThreadingHTTPServer.daemon_threads = True
    server.server.HTTPServer = ThreadingHTTPServer
    emulator.main()


if __name__ == "__main__":
    main()
