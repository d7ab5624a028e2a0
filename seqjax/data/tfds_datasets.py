"""Datasets that tensorflow-datasets has prepared, read without TensorFlow (the extra `tfds`).

A dataset is a directory NAME[/CONFIG]/VERSION with `dataset_info.json`. What it holds is read from there, so the code
that made it is not needed. Its records must be in ArrayRecord files: those are read at any place, and without
TensorFlow, which the default of tensorflow-datasets, tfrecord, is not.
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


class Dataset:
    """One prepared dataset, at one config and version.

    Attributes:
        name: NAME[/CONFIG]/VERSION.
        splits: The names of its splits.
    """

    def __init__(self, directory: Path, *, feature: str = ""):
        """Open the dataset in `directory`, whose texts are the `feature`; empty chooses it (`_text_feature`).

        Raises `UserError` if it cannot be read, is in another file format, or has no such text.
        """
        self._directory = directory
        self._builder = _builder(directory)
        self.name: str = self._builder.info.full_name
        self.splits = tuple(self._builder.info.splits)
        self._feature = _text_feature(self._builder.info.features, feature, name=self.name)

    def documents(self, split: str, *, key: str) -> "SplitDocuments":
        """Return the texts of a split or a slice of one, `train[:10%]` for instance, that the setting `key` names."""
        try:
            info = self._builder.info.splits[split]
        except (KeyError, ValueError):
            raise UserError(
                f"config.data.{key}={split!r}: {self.name} has the splits {', '.join(self.splits)}; give one of them, "
                "or a slice such as 'train[:90%]'."
            ) from None
        if info.num_examples <= 0:
            raise UserError(f"config.data.{key}={split!r}: {self.name} has no document there; give another slice.")
        parts = []
        for part in info.file_instructions:
            path = Path(part.filename)
            if not path.is_file():
                raise UserError(
                    f"{path} is missing: put back a copy of it, or delete {path.parent} and build it again."
                )
            parts.append((path.name, part.skip, part.take, path.stat().st_size, path.stat().st_mtime_ns))
        return SplitDocuments(str(self._directory), split, self._feature, name=f"{self.name} {split}", files=parts)


class SplitDocuments:
    """The texts of a split; `document_blocks.Documents`. It is opened where it is read first, in a worker for instance.

    Attributes:
        name: For messages.
        feature: The feature that is the text; a.b is b within a.
        files: Says which records of which files they are, with the sizes and times of these.
    """

    def __init__(self, directory: str, split: str, feature: str, *, name: str, files: Sequence[tuple[Any, ...]]):
        self._directory, self._split = directory, split
        self.name, self.feature, self.files = name, feature, tuple(files)
        self._source: Any = None

    def __len__(self) -> int:
        return sum(take for _, _, take, *_ in self.files)

    def __getitem__(self, index: int) -> str:
        if self._source is None:
            self._source = _builder(Path(self._directory)).as_data_source(self._split)
        try:
            value = self._source[index]
        except Exception as error:  # Array_record raises what its reader in C++ does, without the name of the file.
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"{self._directory} is damaged: document {index} of {self._split} cannot be read ({why}). Put back a "
                "copy of it, or delete the directory and build it again."
            ) from error
        for part in self.feature.split("."):
            value = value[part]
        try:
            text = value.decode("utf-8")
        except UnicodeDecodeError:
            return ""
        return text if text.strip() else ""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_source": None}


def data_directory(path: str) -> Path:
    """Return the directory of all datasets, that of tensorflow-datasets if `path` is empty.

    Raises `UserError` if it does not exist.
    """
    if "://" in path:
        raise UserError(
            f"config.data.path={path!r}: datasets are read from local directories; copy the one to be read first, with "
            f"its place below the data directory (NAME/CONFIG/VERSION), `gsutil -m cp -r` or `aws s3 cp --recursive`."
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
    build = _build(name, config, root)
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


def _build(name: str, config: str | None, root: Path) -> str:
    """Return how to build a dataset, for a message."""
    if name == OWN:
        domains = f" --domains={config}" if config else ""
        return f"Build it: `python -m seqjax.data.build_slim_pajama --source=SHARDS --data_dir={root}{domains}`."
    full = f"{name}/{config}" if config else name
    return (
        f"Build it, in Python: `tfds.builder({full!r}, data_dir={str(root)!r}, "
        f"file_format={FORMAT!r}).download_and_prepare()`."
    )


def _builder(directory: Path) -> Any:
    """Return the dataset in a directory, to be read from ArrayRecord files."""
    tfds = require()
    try:
        builder = tfds.builder_from_directory(str(directory))
        own, others = builder.info.file_format, builder.info.alternative_file_formats
    except Exception as error:  # It raises what its readers of JSON, protocol buffers and features do.
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{directory} cannot be read ({type(error).__name__}: {why}); delete it, and build the dataset again."
        ) from error
    wanted = tfds.core.FileFormat(FORMAT)
    if own == wanted:
        return builder
    if FORMAT in {getattr(other, "value", other) for other in others}:
        return tfds.builder_from_directory(str(directory), file_format=FORMAT)
    found = own.value if own is not None else "tfrecord"
    root = directory.parents[2 if builder.info.config_name else 1]
    raise UserError(
        f"{directory} is in the file format {found}, which is not read here. Delete it, and build it as {FORMAT}. "
        f"{_build(builder.info.name, builder.info.config_name, root)}"
    )


def _text_feature(features: Any, wanted: str, *, name: str) -> str:
    """Return the feature with the texts: `wanted`, or the only text, or the one called text."""
    texts = _texts(features, "")
    has = f"{name} has the texts {', '.join(texts)}" if texts else f"{name} has no text among its features"
    if wanted:
        if wanted not in texts:
            raise UserError(f"config.data.tfds_feature={wanted!r}: {has}; give one of them, or another dataset.")
        return wanted
    if len(texts) == 1:
        return texts[0]
    if "text" in texts:
        return "text"
    fix = "say which in config.data.tfds_feature" if texts else "give another in config.data.tfds"
    raise UserError(f"config.data.tfds: {has}; {fix}.")


def _texts(features: Any, prefix: str) -> list[str]:
    """Return the features that are one string each; those within another are called a.b."""
    tfds = require()
    found = []
    for key, feature in features.items():
        if isinstance(feature, tfds.features.FeaturesDict):
            found += _texts(feature, f"{prefix}{key}.")
        elif isinstance(feature, tfds.features.Text):
            found.append(f"{prefix}{key}")
    return found
