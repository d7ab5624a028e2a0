"""Which paths are URLs, `s3://bucket/blocks` and the like, and what may be kept or written where."""

import os
import re
from pathlib import Path

from seqjax.errors import UserError

WORKDIRS = ("gs",)  # schemes where a run can be kept: Orbax writes checkpoints there itself


def url_of(path: str | os.PathLike[str]) -> str:
    """Return the URL that `path` is, or "" if it is a path of this machine.

    `Path("s3://bucket/run")` has lost a slash, which is put back.
    """
    found = re.fullmatch(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", os.fspath(path), re.DOTALL)
    if found is None:
        return ""
    if found[1] in ("file", "local") or "::" in found[2]:  # What comes after the slashes is for fsspec to read.
        return os.fspath(path)
    return f"{found[1]}://{found[2].rstrip('/')}"


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a URL, and not one of a file of this machine."""
    return scheme(url_of(path)) not in ("", "file", "local")


def location(text: str) -> str | Path:
    """Return what an option that takes a path or a URL was given: the URL as text, or the path."""
    return url_of(text) or Path(text)


def scheme(url: str) -> str:
    """Return `s3` of `s3://bucket/run`; "" of a path."""
    return url_of(url).partition(":")[0]


def require_local(path: str | os.PathLike[str], option: str) -> None:
    """Raise `UserError` if `path`, the value of `option`, is a URL where only a path of this machine will do."""
    if url := url_of(path):
        raise UserError(f"{option}={url}: this is written to a path of this machine; copy it to the store afterwards.")


def require_workdir(url: str) -> None:
    """Raise `UserError` for a URL where no run can be kept."""
    if scheme(url) not in WORKDIRS:
        raise UserError(
            f"--workdir={url}: a run is kept in a directory of this machine (a plain path), or in gs://BUCKET/PATH. "
            "For another store, mount the bucket and give the directory, or train in a directory and sync it."
        )
    if not url.partition("://")[2].strip("/"):
        raise UserError(f"--workdir={url} names no bucket: write {scheme(url)}://BUCKET/PATH.")
