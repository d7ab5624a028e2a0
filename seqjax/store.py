"""URLs such as `gs://bucket/run`, and their object stores (fsspec).

Only this module knows the packages for URL schemes. They are imported when a URL is first used. A store object appears
whole or not at all, however its writer dies. There is no such guarantee for several objects together, so data in
several objects has a marker object that is written last.
"""

import concurrent.futures
import contextlib
import datetime
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import fsspec
from etils import epath
from fsspec import config as fsspec_config

from seqjax.errors import UserError
from seqjax.escape import line
from seqjax.files import DISK_FULL, is_text, temporary_beside

WORKDIRS = ("gs",)  # schemes that can hold a run: Orbax writes checkpoints there
# fsspec schemes that may run code chosen by a file or server. A data path may come from a stranger's config.json.
REFUSED = ("dask", "generic", "reference")
LONGEST_NAME = 255  # bytes, in common file systems


def url_of(path: str | os.PathLike[str]) -> str:
    """Return `path` as a URL, or "" for a path on this machine.

    The slash that `Path("s3://bucket/run")` has lost is put back.
    """
    match = re.fullmatch(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", os.fspath(path), re.DOTALL)
    if match is None:
        return ""
    if match[1] in ("file", "local") or "::" in match[2]:  # fsspec interprets the part after the slashes.
        return os.fspath(path)
    return f"{match[1]}://{match[2].rstrip('/')}"


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a URL, except a local file's URL."""
    return scheme(url_of(path)) not in ("", "file", "local")


def location(path: str | os.PathLike[str]) -> str | Path:
    """Return a user's path or URL in a form that all libraries read alike.

    A URL is returned as text, a path as a `Path`. Python, Orbax, tensorstore, fsspec and Grain disagree about `~`,
    `file:`, a colon in the first part, two leading slashes, and `..` after a link. `~` is therefore replaced by the
    home directory, and `..` is resolved. A path with `~` or a colon in its first part becomes absolute.

    Raises `UserError` for an empty text; `Path` would take it as the current directory. Also raises it for backslashes,
    line feeds, `::`, bytes outside UTF-8, and names that are too long, because no form of them works.
    """
    text = os.fspath(path)
    if not text:
        raise UserError("An empty value, as in --workdir=, is not a path or URL; write `.` for the current directory.")
    if not is_text(text):
        raise UserError(f"{text!a}: this shell's locale lacks these characters. Set PYTHONUTF8=1, or LC_ALL=C.UTF-8.")
    if "\0" in text:
        raise UserError(f"{line(text)}: a path cannot contain the character 0; leave it out.")
    if (of_file := re.match("(?:file|local):", text)) and re.match("/(?:$|//|[^/])", text[of_file.end() :]):
        text = text[of_file.end() :]
    elif of_file:
        raise UserError(f"{line(text)}: write a plain path; a file or directory of this name is ./{line(text)}.")
    elif url := url_of(text):
        return url
    local_path = Path(os.path.expanduser(re.sub("^//+", "/", text)))  # noqa: PTH111 - `Path` raises for an unknown user
    if text.startswith("~") and str(local_path).startswith("~"):
        raise UserError(
            f"{line(text)}: this machine has no such user; a file or directory of this name is ./{line(text)}."
        )
    if ".." in local_path.parts:
        local_path = Path(os.path.realpath(local_path))  # `Path.resolve` raises other errors for cyclic links
    elif local_path.parts and (local_path.parts[0].startswith("~") or ":" in local_path.parts[0]):
        local_path = local_path.absolute()
    full_path = local_path.absolute().as_posix()
    _refuse(("\\", "::", "\n"), full_path)
    if any(len(part.encode()) > LONGEST_NAME for part in local_path.parts):
        raise UserError(f"{line(text)}: a name has at most {LONGEST_NAME} bytes; give a shorter one.")
    return local_path


def local(path: str | os.PathLike[str], option: str) -> Path:
    """Return `location(path)`; raise `UserError` if the value of `option` is a URL."""
    target = location(path)
    if isinstance(target, str):
        raise UserError(
            f"{option}={target}: this is written to a path of this machine; copy it to the store afterwards."
        )
    return target


def scheme(url: str) -> str:
    """Return `s3` for `s3://bucket/run`; "" for a path."""
    return url_of(url).partition(":")[0]


def _refuse(marks: Sequence[str], path: str) -> None:
    if refused := [mark for mark in marks if mark in path]:
        raise UserError(f"{line(path)}: libraries disagree about {refused[0]!r} in a path; rename the directory.")


def require_workdir(workdir: str | Path) -> None:
    """Raise `UserError` for a URL or path that cannot hold a run.

    Orbax reads `*`, `?` and `[` in a path as a pattern.
    """
    if not (url := url_of(workdir)):
        _refuse("*?[", str(Path(workdir).absolute()))
        return
    if scheme(url) not in WORKDIRS:
        raise UserError(
            f"--workdir={url}: a run is kept in a directory of this machine (a plain path), or in gs://BUCKET/PATH. "
            "For another store, mount the bucket and give the directory, or train in a directory and sync it."
        )
    if not url.partition("://")[2].strip("/"):
        raise UserError(f"--workdir={url} names no bucket: write {scheme(url)}://BUCKET/PATH.")
    if {".", ".."} & {*url.split("/")}:  # the cached copy would be in another directory
        raise UserError(f"--workdir={url}: write the path without `.` and `..`.")


Result = TypeVar("Result")

EXTRAS = {"gs": "gcs", "gcs": "gcs"}  # scheme -> seqjax extra with its package; users install further packages
THREADS = 8  # objects read or written at a time
RETRY_SECONDS = (1.0, 5.0, 20.0)  # waits after a failure, in addition to the packages' retries


class StoreError(UserError):
    """A store could not be reached, or refused access."""


def filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system for a URL, and the path in it.

    Raises `UserError` for a missing package or a scheme in `REFUSED`.
    """
    _require_data(url)
    key = (os.getpid(), *url_of(url).split("/")[:3:2])
    try:
        # fsspec would create a file system, with a new connection, for each thread.
        if "::" not in url and (known := _systems.get(key)) is not None:
            return known, cast(str, known._strip_protocol(url))
        fs, path = fsspec.core.url_to_fs(url)
        if "::" not in url:
            fs = _systems.setdefault(key, fs)
    except ImportError as error:
        extra = EXTRAS.get(scheme(url))
        how = f"pip install 'seqjax[{extra}]'" if extra else str(error).rstrip(".")
        raise UserError(f"{url} needs a package that is not installed: {how}.") from error
    except ValueError as error:
        raise UserError(f"{url}: {error}. Give a local path, or a URL that fsspec opens.") from error
    except Exception as error:  # Some file systems connect here, or look for credentials.
        raise _store_error(url, error) from error
    return fs, cast(str, path)


def _require_data(url: str) -> None:
    """Raise `UserError` if a part of a URL has a scheme in `REFUSED`.

    A URL for fsspec may join several parts by `::`.
    """
    for part in url.split("::"):
        if (match := re.match(r"[\w+.-]+(?=://|$)", part)) and match[0].lower() in REFUSED:
            raise UserError(
                f"{url}: the scheme {match[0]} may run code that the data chooses, so it is not opened. Copy the data "
                "to a directory or a bucket."
            )


def orbax_path(url: str) -> epath.Path:
    """Return the path with which Orbax reads and writes a URL.

    This also turns off gcsfs's listing cache in this process. The cache would hide what other processes write and
    remove.
    """
    for name in ("gs", "gcs"):
        fsspec_config.conf.setdefault(name, {}).setdefault("use_listings_cache", False)
    return epath.Path(url)


_systems: dict[tuple[Any, ...], Any] = {}  # by process, scheme and bucket


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Return a context that turns store errors into a `StoreError` about `url`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:  # of the local disk
            raise
        raise _store_error(url, error) from error


def _store_error(url: str, error: Exception) -> StoreError:
    first = (str(error).strip().splitlines() or ["no message"])[0]
    if isinstance(error, FileNotFoundError):
        return StoreError(f"{url} does not exist, or its bucket does not ({first}). Check the name.")
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return StoreError(f"{url}: access was refused ({first}). Check the credentials on this machine.")
    return StoreError(
        f"{url} cannot be reached ({type(error).__name__}: {first}). Check the network, the credentials and, for a "
        "server of your own, its address (AWS_ENDPOINT_URL, STORAGE_EMULATOR_HOST)."
    )


def _with_retries(url: str, function: Callable[[], Result]) -> Result:
    """Return an idempotent operation's result; retry after temporary errors."""
    with reaching(url):
        for seconds in RETRY_SECONDS:
            try:
                return function()
            except (FileNotFoundError, FileExistsError, PermissionError):
                raise
            except Exception as error:
                if "Credentials" in type(error).__name__:
                    raise
                if isinstance(error, OSError) and error.errno in DISK_FULL:
                    raise
            time.sleep(seconds)
        return function()


def in_threads(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """Return the results of `function` for all items, several at a time.

    Raises the first error.
    """
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def sizes(url: str) -> dict[str, int]:
    """Return the sizes in bytes of all objects below `url`, by relative name.

    The result is empty if there are no objects.
    """
    return {name: int(info["size"]) for name, info in _entries(url).items()}


def versions(url: str) -> dict[str, str]:
    """Return a version text for each object below `url`, by relative name.

    The text changes when the object is written.
    """
    return {name: str(info) for name, info in _entries(url).items()}


def _entries(url: str) -> dict[str, dict[str, Any]]:
    fs, root = filesystem(url)

    def find() -> dict[str, dict[str, Any]]:
        fs.invalidate_cache()  # Other processes write objects too.
        return fs.find(root, detail=True)

    base = root.rstrip("/") + "/"
    entries = _with_retries(url, find)
    return {
        path.removeprefix(base): info
        for path, info in entries.items()
        if path.startswith(base)
        and info["type"] == "file"
        and not path.endswith("/")
        # Objects are copied by name, and a copy must stay inside its target directory.
        and not {"", ".", ".."} & {*path.removeprefix(base).split("/")}
    }


def read(url: str) -> bytes | None:
    """Return an object's content, or None if it does not exist."""
    fs, path = filesystem(url)

    def content() -> bytes | None:
        try:
            return fs.cat_file(path)
        except FileNotFoundError:
            return None

    return _with_retries(url, content)


@contextlib.contextmanager
def reading(url: str) -> Iterator[Any]:
    """Return a context that opens a file or object to read bytes.

    Store failures raise a `StoreError`.
    """
    _require_data(url)
    if not is_remote(url):
        with cast(Any, fsspec.open(url, "rb")) as file:
            yield file
        return
    fs, path = filesystem(url)
    with reaching(url):
        opened = fs.open(path, "rb")
    with opened:
        yield _Reader(opened, url)


class _Reader:
    """A file with the URL in its error messages."""

    def __init__(self, file: Any, url: str):
        self._file, self._url = file, url

    def read(self, *args: Any) -> bytes:
        with reaching(self._url):
            return self._file.read(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def write(url: str, content: bytes) -> None:
    """Write an object, replacing any previous object."""
    fs, path = filesystem(url)
    _with_retries(url, lambda: fs.pipe_file(path, content))


def create(url: str, content: bytes) -> bool:
    """Write an object unless it exists, and return whether it was written.

    Not all stores check this, so the caller must read the object back.
    """
    fs, path = filesystem(url)
    with reaching(url):
        try:
            fs.pipe_file(path, content, mode="create")
        except FileExistsError:
            return False
        except Exception as error:
            if "412" in str(error) or "recondition" in str(error):  # gcsfs has no exception type for this
                return False
            raise
    return True


def modified(url: str) -> datetime.datetime | None:
    """Return when an object was written, by the store's clock.

    Returns None if it does not exist.
    """
    fs, path = filesystem(url)

    def time_of() -> datetime.datetime | None:
        fs.invalidate_cache()
        try:
            return fs.modified(path)
        except FileNotFoundError:
            return None

    return _with_retries(url, time_of)


def download(url: str, path: Path) -> None:
    """Copy an object to a file that appears when complete.

    Raises `StoreError` if the object does not exist.
    """
    fs, source = filesystem(url)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    try:
        _with_retries(url, lambda: fs.get_file(source, str(temporary)))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def remove(url: str) -> None:
    """Remove an object if it exists."""
    fs, path = filesystem(url)

    def removed() -> None:
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(path)

    _with_retries(url, removed)
