"""Read tensorflow-datasets (the extra `tfds`) without TensorFlow.

A dataset is a directory NAME[/CONFIG]/VERSION with `dataset_info.json`. Each dataset or config is one domain. The
records must be in ArrayRecord files: the tensorflow-datasets default, tfrecord, needs TensorFlow. The directory
describes its content, so the code that built it is not needed. `corpus=tfds` streams datasets, and `prepare` makes
blocks from them.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from seqjax.command_line import run_command
from seqjax.data import hold_out, splits
from seqjax.data.layout import SLIMPAJAMA, Layout, clean
from seqjax.data.sources import Shard, ignore
from seqjax.errors import MissingPackageError, UserError, first_line, nearest

FORMAT = "array_record"
INFO = "dataset_info.json"
READ = 64  # records read together
LIMIT = hold_out.SHARE * hold_out.HASHES  # texts with smaller hashes are held out
_NAME = re.compile(r"(?:(?P<domain>[^=]+)=)?(?P<name>\w+)(?:/(?P<config>[\w.+-]+))?(?::(?P<version>\d+\.\d+\.\d+))?")
_VERSION = re.compile(r"\d+\.\d+\.\d+")
REMOVED = "slim_pajama"  # earlier versions built this dataset
INSTEAD = (
    f"seqjax no longer builds {REMOVED}. Read its shards with --config.data.corpus=stream --config.data.path=SHARDS, "
    "or make blocks of them: `seqjax prepare --source=SHARDS --out=DIR --tokenizer=byte`."
)


def require() -> Any:
    """Return the package tensorflow_datasets.

    Raises `MissingPackageError` if it is not installed.
    """
    try:
        import tensorflow_datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingPackageError(
            "config.data.corpus='tfds' needs tensorflow-datasets: install it with `pip install 'seqjax[tfds]'`."
        ) from None
    return tensorflow_datasets


# ------------------------------------------------------------------------------------------------------------- reading
@dataclasses.dataclass(frozen=True)
class TfdsShard(Shard):
    """`take` records of a dataset file, after the first `skip`.

    The shard `name` starts with the domain.

    Attributes:
        directory: The directory of the dataset.
        skip: Number of records to skip.
        take: Number of records to read.
        feature: The text feature; a.b is b within a. Empty lets `_text_feature` choose.
        held_out: True yields only texts held out by their hash, False only the remaining texts, None all.
    """

    directory: str
    skip: int
    take: int
    feature: str = ""
    held_out: bool | None = None

    layout = Layout(domain_from="folder")
    package = "tensorflow-datasets"

    def records(
        self, layout: Layout = SLIMPAJAMA, *, on_read: Callable[[int], None] = ignore
    ) -> Iterator[dict[str, str]]:
        """Yield rows with only the text.

        Raises `UserError` if the file is damaged or has no such text.
        """
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        info = _info(Path(self.directory))
        feature = self.feature or (layout.text_field if layout.text_field != SLIMPAJAMA.text_field else "")
        path = _text_feature(info.features, feature, name=info.full_name).split(".")
        done = 0
        try:
            with ArrayRecordDataSource(f"{self.url}[{self.skip}:{self.skip + self.take}]") as source:
                for begin in range(0, self.take, READ):
                    numbers = range(begin, min(begin + READ, self.take))
                    for record in source.__getitems__(numbers):
                        row = info.features.deserialize_example_np(record)
                        value = functools.reduce(lambda features, part: features[part], path, row)
                        # Invalid UTF-8 becomes characters that `Layout.document` refuses.
                        text = value.decode("utf-8", "surrogateescape")
                        if self.held_out is None or self.held_out == (hold_out.text_hash(text) < LIMIT):
                            yield {layout.text_field: text}
                    now = self.size * (numbers[-1] + 1) // self.take
                    on_read(now - done)
                    done = now
        except Exception as error:  # The errors of array_record's C++ reader lack the file name.
            raise UserError(
                f"{self.url} is damaged ({first_line(error)}). Put back a copy of it, or delete {self.directory} and "
                "build it again."
            ) from error

    @classmethod
    def require(cls) -> None:
        """Raise `MissingPackageError` if tensorflow-datasets is not installed."""
        require()

    @classmethod
    def find(cls, source: str) -> Sequence[Shard]:
        """Return the shards of a dataset directory NAME[/CONFIG[/VERSION]].

        The default is the newest version of each config. Splits named train, validation or test, or recognised as such
        (`splits.named_split`), are read; other splits are left out.
        """
        root = Path(source)
        if not root.is_dir():
            return ()
        is_version = _VERSION.fullmatch(root.name) and (root / INFO).is_file()
        directories = [root] if is_version else [list(of.values())[-1] for of in _versions(root).values()]
        dataset_shards: list[Shard] = []
        for directory in directories:
            info = _info(directory)
            for into, split in _split_names(info).items():
                domain = clean(info.config_name or info.name)
                dataset_shards += _shards(directory, info, split, into=into, domain=domain)
        return dataset_shards


def config_shards(
    names: Sequence[str], path: str, *, feature: str, train_split: str, validation_split: str
) -> list[Shard]:
    """Return the shards of the datasets `names` (`config.data.tfds`) in `path`.

    `validation_split` names the validation split. If it is empty, the split called validation is used, otherwise test,
    otherwise 1 % of the training documents (`seqjax.data.hold_out`). Splits may be slices, such as `train[:10%]`.

    Raises `UserError` for a dataset that is not prepared, has another file format, or lacks the text or the split.
    """
    require()
    out: list[Shard] = []
    for domain, directory in dataset_directories(names, data_directory(path)).items():
        info = _info(directory)
        _text_feature(info.features, feature, name=info.full_name)
        of_split = _split_names(info)
        validation = validation_split or of_split.get("validation") or of_split.get("test", "")
        for into, split, held_out in (
            ("train", train_split, None if validation else False),
            ("validation", validation or train_split, None if validation else True),
        ):
            out += _shards(directory, info, split, into=into, domain=domain, feature=feature, held_out=held_out)
    return out


def _split_names(info: Any) -> dict[str, str]:
    """Return the dataset's names for its train, validation and test splits, if any."""
    names: dict[str, list[str]] = {split: [] for split in splits.SPLITS}
    for name in sorted(info.splits):
        if split := splits.named_split(name):
            names[split].append(name)
    return {split: split if split in matches else matches[0] for split, matches in names.items() if matches}


def _shards(
    directory: Path, info: Any, split: str, *, into: str, domain: str, feature: str = "", held_out: bool | None = None
) -> list[TfdsShard]:
    """Return the files of a split, or of a split slice, as shards for split `into`."""
    key = f"config.data.tfds_{into}_split={split!r}"
    try:
        chosen = info.splits[split]
    except (KeyError, ValueError):
        raise UserError(
            f"{key}: {info.full_name} has the splits {', '.join(info.splits)}; give one of them, or a slice such as "
            "'train[:90%]'."
        ) from None
    if chosen.num_examples <= 0:
        raise UserError(f"{key}: this slice of {info.full_name} has no documents; give another slice.")
    share, mark = {None: (1, ""), True: (hold_out.SHARE, " held out"), False: (1 - hold_out.SHARE, " kept")}[held_out]
    out = []
    for part in chosen.file_instructions:
        path = Path(part.filename)
        if not path.is_file():
            raise UserError(f"{path} is missing: put back a copy of it, or delete {path.parent} and build it again.")
        # The shard name identifies a run's data, so it contains everything that determines the data.
        name = f"{domain}/{path.name}[{part.skip}:{part.skip + part.take}] {feature}{mark}".rstrip()
        size = int(share * path.stat().st_size * part.take / part.examples_in_shard)
        out.append(TfdsShard(str(path), name, into, size, str(directory), part.skip, part.take, feature, held_out))
    return out


# ------------------------------------------------------------------------------------------------------------- finding
def data_directory(path: str) -> Path:
    """Return the data directory for all datasets.

    An empty `path` selects the tensorflow-datasets default. Raises `UserError` if the directory does not exist.
    """
    if "://" in path:
        raise UserError(f"config.data.path={path!r}: only a local directory is read; copy the datasets into one.")
    root = Path(path or require().core.constants.DATA_DIR).expanduser()
    if not root.is_dir():
        raise UserError(
            f"config.data.path: no directory {root}; give the data directory of tensorflow-datasets, which holds "
            "NAME/VERSION or NAME/CONFIG/VERSION for each dataset."
        )
    return root


def dataset_directories(names: Sequence[str], root: Path) -> dict[str, Path]:
    """Return the directories of the datasets `names` (`config.data.tfds`), by domain.

    A name without a config selects all existing configs. A name without a version selects the newest. The domain is the
    config name, or the dataset name if it has no configs. Raises `UserError` for a dataset that is not prepared, and
    for two datasets with the same domain.
    """
    directories: dict[str, Path] = {}
    for dataset in names:
        match = _NAME.fullmatch(dataset)
        if match is None or clean(match["domain"] or "a") != (match["domain"] or "a"):
            form = "[DOMAIN=]NAME[/CONFIG][:VERSION] with a DOMAIN of a-z, 0-9, _ and -"
            raise UserError(f"config.data.tfds: {dataset!r} is not {form}.")
        for name, directory in _directories(root, match["name"], match["config"], match["version"]).items():
            domain = match["domain"] or clean(name)
            if domain in directories:
                full = name if name == match["name"] else f"{match['name']}/{name}"
                raise UserError(
                    f"config.data.tfds: {directories[domain]} and {directory} both are the domain {domain!r}; write "
                    f"'DOMAIN={full}' for one of them, with another DOMAIN."
                )
            directories[domain] = directory
    return directories


def _directories(root: Path, name: str, config: str | None, version: str | None) -> dict[str, Path]:
    """Return a dataset's directory by its name, or its config directories by theirs."""
    home, build = root / name, _how_to_build(name, config, root)
    if not home.is_dir():
        available = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        hint = nearest(name, available) if available else ""
        raise UserError(f"config.data.tfds: there is no dataset {name} in {root}.{hint} {build}")
    configs = _versions(home)
    if not configs:
        raise UserError(
            f"config.data.tfds: {home} holds no complete dataset (a directory VERSION with a {INFO}). Move it away. "
            f"{build}"
        )
    if config and list(configs) == [name]:
        raise UserError(f"config.data.tfds: {name} has no configs; write {name!r} without /{config}.")
    if config and config not in configs:
        hint = nearest(config, configs)
        raise UserError(f"config.data.tfds: {name}/{config} is not prepared in {root}.{hint} {build}")
    chosen = {key: versions for key, versions in configs.items() if config in (None, key)}
    for key, versions in chosen.items():
        if version and version not in versions:
            raise UserError(
                f"config.data.tfds: there is no version {version} of {name}/{key}, which has {', '.join(versions)}."
            )
    return {key: versions[version or list(versions)[-1]] for key, versions in chosen.items()}


def _versions(home: Path) -> dict[str, dict[str, Path]]:
    """Return the versions of a dataset, or of each of its configs, newest last.

    The keys are the dataset or config names.
    """
    by_name = {}
    for directory in (home, *sorted(path for path in home.iterdir() if path.is_dir())):
        versions = [file.parent for file in directory.glob(f"*/{INFO}") if _VERSION.fullmatch(file.parent.name)]
        if versions:
            versions.sort(key=lambda path: tuple(map(int, path.name.split("."))))
            by_name[directory.name] = {path.name: path for path in versions}
        if directory == home and versions:
            break
    return by_name


def _how_to_build(name: str, config: str | None, root: Path) -> str:
    """Return message text that explains how to build a dataset in `root`."""
    if name == REMOVED:
        return INSTEAD
    full = f"{name}/{config}" if config else name
    return (
        f"Build it, in Python: `tfds.builder({full!r}, data_dir={str(root)!r}, "
        f"file_format={FORMAT!r}).download_and_prepare()`."
    )


def _info(directory: Path) -> Any:
    """Return the dataset information for a directory with ArrayRecord files.

    Raises `UserError` if the directory cannot be read or has another file format.
    """
    tfds = require()
    try:
        info = tfds.builder_from_directory(str(directory)).info
        formats = [
            getattr(each, "value", each) for each in (info.file_format or "tfrecord", *info.alternative_file_formats)
        ]
        if FORMAT in formats:
            return tfds.builder_from_directory(str(directory), file_format=FORMAT).info
    except Exception as error:  # Its JSON, protocol buffer and feature readers raise different errors.
        raise UserError(
            f"{directory} cannot be read ({type(error).__name__}: {first_line(error)}); delete it, and build the "
            "dataset again."
        ) from error
    root = directory.parents[2 if info.config_name else 1]
    raise UserError(
        f"{directory} has the file format {formats[0]} instead of {FORMAT}: delete it first. "
        f"{_how_to_build(info.name, info.config_name, root)}"
    )


def _text_feature(features: Any, requested: str, *, name: str) -> str:
    """Return the text feature: `requested`, the only text, or the text called "text"."""
    texts = _texts(features, "")
    has = f"{name} has the texts {', '.join(texts)}" if texts else f"{name} has no text among its features"
    if requested:
        if requested not in texts:
            raise UserError(f"config.data.tfds_feature={requested!r}: {has}; give one of them, or another dataset.")
        return requested
    if len(texts) == 1:
        return texts[0]
    if "text" in texts:
        return "text"
    fix = "say which in config.data.tfds_feature" if texts else "give another in config.data.tfds"
    raise UserError(f"config.data.tfds: {has}; {fix}.")


def _texts(features: Any, prefix: str) -> list[str]:
    """Return the features that are one string each; a nested feature is called a.b."""
    tfds = require()
    names = []
    for key, feature in sorted(features.items()):  # Features that are read from files have no order.
        if isinstance(feature, tfds.features.FeaturesDict):
            names += _texts(feature, f"{prefix}{key}.")
        elif isinstance(feature, tfds.features.Text):
            names.append(f"{prefix}{key}")
    return names


# ------------------------------------------------------------------------------------------------------------- removed
def main(argv: list[str]) -> None:
    """Raise `UserError` that names the replacement for this removed command."""
    del argv
    raise UserError(INSTEAD)


if __name__ == "__main__":
    run_command(main)
