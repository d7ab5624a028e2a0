"""Where the datasets are that tensorflow-datasets has prepared (the extra `tfds`), by name and by domain.

A dataset is a directory NAME[/CONFIG]/VERSION with `dataset_info.json` below the data directory.
`seqjax.data.tfds_documents` reads one.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqjax.data.layout import clean
from seqjax.errors import MissingPackageError, UserError, nearest

OWN = "slim_pajama"  # built by `slim_pajama_tfds`
FORMAT = "array_record"
INFO = "dataset_info.json"
_NAME = re.compile(r"(?:(?P<domain>[^=]+)=)?(?P<name>\w+)(?:/(?P<config>[\w.+-]+))?(?::(?P<version>\d+\.\d+\.\d+))?")
_VERSION = re.compile(r"\d+\.\d+\.\d+")


def require() -> Any:
    """Return the package tensorflow_datasets; raise `UserError` if it is not installed."""
    try:
        import tensorflow_datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingPackageError(
            "config.data.corpus='tfds' needs tensorflow-datasets: install it with `pip install 'seqjax[tfds]'`."
        ) from None
    return tensorflow_datasets


def data_directory(path: str) -> Path:
    """Return the directory of all datasets, that of tensorflow-datasets if `path` is empty.

    Raises `UserError` if it does not exist.
    """
    if "://" in path:
        raise UserError(
            f"config.data.path={path!r}: datasets are read from a local directory; copy NAME/CONFIG/VERSION of those "
            "that are needed into one first."
        )
    root = Path(path or require().core.constants.DATA_DIR).expanduser()
    if not root.is_dir():
        raise UserError(
            f"config.data.path: no directory {root}; give the data directory of tensorflow-datasets, which holds "
            "NAME/VERSION or NAME/CONFIG/VERSION for each dataset."
        )
    return root


def find(names: Sequence[str], root: Path) -> dict[str, Path]:
    """Return the directory of every dataset that `names` means (`config.data.tfds`), by domain.

    A name without a config means all configs that are there. Without a version it is the newest one. The domain is
    called like the config, or like a dataset that has none. Raises `UserError` for a dataset that is not prepared, and
    for two of one domain.
    """
    found: dict[str, Path] = {}
    for given in names:
        match = _NAME.fullmatch(given)
        if match is None or clean(match["domain"] or "a") != (match["domain"] or "a"):
            raise UserError(
                f"config.data.tfds: {given!r} is not [DOMAIN=]NAME[/CONFIG][:VERSION]; DOMAIN consists of a-z, 0-9, _ "
                "and -."
            )
        for name, directory in _directories(root, **match.groupdict()).items():
            domain = match["domain"] or clean(name)
            if domain in found:
                raise UserError(
                    f"config.data.tfds: {found[domain]} and {directory} both are the domain {domain!r}; write "
                    "'DOMAIN=NAME/CONFIG' for one of them, with a DOMAIN of its own."
                )
            found[domain] = directory
    return found


def _directories(
    root: Path, *, domain: str | None, name: str, config: str | None, version: str | None
) -> dict[str, Path]:
    """Return the directory of a dataset by its name, or those of its configs by theirs."""
    del domain
    home = root / name
    build = how_to_build(name, config, root)
    if not home.is_dir():
        others = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        hint = nearest(name, others) if others else ""
        raise UserError(f"config.data.tfds: there is no dataset {name} in {root}.{hint} {build}")
    plain = _versions(home)
    if plain and config:
        raise UserError(f"config.data.tfds: {name} has no configs; write {name!r} without /{config}.")
    configs = {path.name: _versions(path) for path in sorted(home.iterdir()) if path.is_dir()}
    configs = {name: plain} if plain else {key: versions for key, versions in configs.items() if versions}
    if not configs:
        raise UserError(
            f"config.data.tfds: {home} holds no complete dataset, a directory VERSION with a {INFO}. {build}"
        )
    if config and config not in configs:
        hint = nearest(config, configs)
        raise UserError(f"config.data.tfds: {name}/{config} is not prepared in {root}.{hint} {build}")
    chosen = {}
    for key, versions in configs.items():
        if config in (None, key):
            wanted = version or max(versions, key=lambda v: tuple(map(int, v.split("."))))
            if wanted not in versions:
                raise UserError(
                    f"config.data.tfds: there is no version {wanted} in {versions[max(versions)].parent}, which has "
                    f"{', '.join(versions)}."
                )
            chosen[key] = versions[wanted]
    return chosen


def _versions(directory: Path) -> dict[str, Path]:
    return {
        path.name: path
        for path in sorted(directory.iterdir())
        if _VERSION.fullmatch(path.name) and (path / INFO).is_file()
    }


def how_to_build(name: str, config: str | None, root: Path) -> str:
    """Return how to build a dataset in `root`, for a message."""
    if name == OWN:
        domains = f" --domains={config}" if config else ""
        return f"Build it: `python -m seqjax.data.build_slim_pajama --source=SHARDS --data_dir={root}{domains}`."
    full = f"{name}/{config}" if config else name
    return (
        f"Build it, in Python: `tfds.builder({full!r}, data_dir={str(root)!r}, "
        f"file_format={FORMAT!r}).download_and_prepare()`."
    )
