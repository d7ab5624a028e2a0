"""The documents of a dataset that tensorflow-datasets has prepared, read at any place and without TensorFlow.

What a dataset holds is read from its directory, so the code that made it is not needed. Its records must be in
ArrayRecord files: the default of tensorflow-datasets, tfrecord, is read in order alone, and by TensorFlow.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqjax.data.tfds_datasets import FORMAT, how_to_build, require
from seqjax.errors import UserError, first_line


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
            raise UserError(
                f"{self._directory} is damaged: document {index} of {self._split} cannot be read "
                f"({first_line(error)}). Put back a copy of it, or delete the directory and build it again."
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


def _builder(directory: Path) -> Any:
    """Return the dataset in a directory, to be read from ArrayRecord files."""
    tfds = require()
    try:
        builder = tfds.builder_from_directory(str(directory))
        own, others = builder.info.file_format, builder.info.alternative_file_formats
    except Exception as error:  # It raises what its readers of JSON, protocol buffers and features do.
        raise UserError(
            f"{directory} cannot be read ({type(error).__name__}: {first_line(error)}); delete it, and build the "
            "dataset again."
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
        f"{how_to_build(builder.info.name, builder.info.config_name, root)}"
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
    for key, feature in sorted(features.items()):  # read from files, they have no order
        if isinstance(feature, tfds.features.FeaturesDict):
            found += _texts(feature, f"{prefix}{key}.")
        elif isinstance(feature, tfds.features.Text):
            found.append(f"{prefix}{key}")
    return found
