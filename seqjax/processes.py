"""Worker processes that do not outlive the process that started them."""

import multiprocessing
import multiprocessing.connection
import os
import threading


def end_with_parent() -> None:
    """Let this process, which `multiprocessing` started, exit when its parent has ended, even if it was killed.

    A process that is killed cannot stop its workers, and each of them holds hundreds of megabytes.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
