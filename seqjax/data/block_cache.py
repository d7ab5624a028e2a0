"""Copy prepared blocks from a store to this machine's cache directory."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from absl import logging

from seqjax import store
from seqjax.data.manifests import SMALL
from seqjax.errors import UserError
from seqjax.files import DISK_FULL, cache_directory, remove_temporaries

try:
    import fcntl
except ImportError:  # Windows lacks it, so processes there may copy a file twice.
    fcntl = None


def copied(directory: str, manifest: dict[str, Any], domains: Collection[str], *, cache_dir: str) -> Path:
    """Return a local directory with the blocks of `domains`.

    This is `directory` if it is local, otherwise a copy in the cache. Raises `UserError` if the store or the cache
    fails.
    """
    url = store.url_of(directory)
    if not url:
        return Path(directory)
    files = [
        file
        for of_split in manifest["splits"].values()
        for domain, entry in of_split.items()
        if domain in domains
        for file in entry["files"]
    ]
    return _copied(url, manifest, {file["path"]: file["bytes"] for file in files}, cache_dir=cache_dir)


def small_files(directory: str, manifest: dict[str, Any], *, cache_dir: str) -> Path:
    """Return a local directory with the manifest's small files, as in `copied`."""
    return copied(directory, manifest, (), cache_dir=cache_dir)


def _copied(url: str, manifest: dict[str, Any], expected_sizes: dict[str, int], *, cache_dir: str) -> Path:
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    root = cache_directory(cache_dir) / "blocks" / digest[:16]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _exclusive(root):
            remove_temporaries(root)
            remote_sizes = store.sizes(url)
            expected_sizes |= {name: remote_sizes[name] for name in SMALL if name in remote_sizes}
            missing = [
                name
                for name, size in expected_sizes.items()
                if not (root / name).is_file() or size != (root / name).stat().st_size
            ]
            _require_room(root, sum(remote_sizes.get(name, 0) for name in missing), url)
            if missing:
                logging.info("Copying %d files of %s to %s.", len(missing), url, root)
            store.in_threads(lambda name: store.download(f"{url}/{name}", root / name), missing)
    except OSError as error:
        if error.errno in DISK_FULL or isinstance(error, PermissionError | FileExistsError | NotADirectoryError):
            raise UserError(
                f"Cannot copy {url} to {root} ({error.strerror}); set config.data.cache_dir to a writable directory "
                "with enough space."
            ) from error
        raise
    return root


@contextlib.contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    """Return a context that only one process at a time can hold for `root`."""
    with (root / ".lock").open("ab") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a kill
        yield


def _require_room(root: Path, needed: int, url: str) -> None:
    free = shutil.disk_usage(root).free
    if needed > free:
        raise UserError(
            f"The blocks that this run reads of {url} take {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free in "
            f"{root}; set config.data.cache_dir to a directory with enough space, or list fewer domains."
        )
