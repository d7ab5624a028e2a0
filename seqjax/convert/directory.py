"""Reads and writes whole public directories: settings, weights and tokenizer.

The package `huggingface_hub` fetches models of the Hugging Face hub, `hf://OWNER/NAME[@REVISION]`.
"""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from seqjax import store
from seqjax.config import Config, from_config_dict, presets
from seqjax.convert import public_config, tokenizer_files
from seqjax.convert.files import find, weight_map
from seqjax.convert.rules import Family
from seqjax.convert.tokenizer_files import FILES
from seqjax.convert.weights import FAMILIES, export_weights, family_of, import_weights
from seqjax.data import huggingface, load_tokenizer
from seqjax.errors import UserError
from seqjax.files import replacing
from seqjax.types import Params

WEIGHTS = "model.safetensors"


class Imported(NamedTuple):
    """A public model as our config and parameters, float32 arrays on the host."""

    config: Config
    params: Params


def is_public(directory: Path) -> bool:
    """Return whether `directory` holds a public model: its config.json has `model_type` and no `model`."""
    hf_config = public_config.read(directory / "config.json")
    return hf_config is not None and "model" not in hf_config


def holding(weights: Path) -> Path:
    """Return the directory of `weights` (a file or a directory); raise `UserError` if it does not exist."""
    return weights if weights.is_dir() else find(weights).parent


class Described(NamedTuple):
    """The model of a config.json: the name of our config, and the overrides of its debug size."""

    name: str
    overrides: dict[str, Any]

    @property
    def argument(self) -> str:
        """The model as a `--config`."""
        return f"{self.name}:debug,{public_config.as_text(self.overrides)}"

    @property
    def config(self) -> Config:
        """The model as our config; all other training settings are from the debug size."""
        config = presets.read_config(f"{self.name}:debug")
        with config.ignore_type():
            config.update_from_flattened_dict(self.overrides)
        return from_config_dict(config)


def described(directory: Path) -> Described:
    """Return the settings of ours for the model in a public directory.

    Raises `UserError` if there is no config.json, or if seqjax does not support the model.
    """
    path = directory / "config.json"
    hf_config = public_config.read(path)
    if hf_config is None:
        raise UserError(f"There is no {path} with a model_type; give --config.")
    of_type = {kind: (name, family) for name, group in FAMILIES.items() for family in group for kind in family.types}
    if hf_config["model_type"] not in of_type:
        known = ", ".join(sorted(of_type))
        raise UserError(f"{path}: seqjax does not support model_type={hf_config['model_type']!r}. Supported: {known}.")
    name, family = of_type[hf_config["model_type"]]
    config = from_config_dict(presets.read_config(f"{name}:debug"))
    return Described(name, public_config.overrides(family, config, path))


def load(weights: Path, *, config: Config | None = None) -> Imported:
    """Return the config and parameters of a public directory, or of `weights` files for a `config` of ours.

    Without `config`, the config comes from config.json, with the debug size's other training settings. The directory's
    tokenizer, if any, replaces the config's tokenizer. Raises `UserError` as `import_weights` does.
    """
    directory = holding(weights)
    if config is None:
        config = described(directory).config
        # Also without a tokenizer file: another tokenizer would give wrong ids.
        config = _with_tokenizer(config, (tokenizer_files.HUGGINGFACE, str(directory)))
    if tokenizer := tokenizer_files.find(directory):
        config = _with_tokenizer(config, tokenizer)
    return Imported(config, import_weights(weights, config))


def export(
    params: Params, config: Config, directory: Path, *, dtype: str = "float32", with_tokenizer: bool = True
) -> None:
    """Write the files that `from_pretrained` reads: config.json, model.safetensors, tokenizer, generation_config.json.

    Raises `UserError` as `export_weights` does, for a tokenizer that does not fit the model, and if a file with other
    content exists.
    """
    family = family_of(config)
    files, bos, eos = {}, None, None
    if with_tokenizer:
        _require_fitting(family, config)
        limit = config.train.seq_len if config.model.learned_positions else None
        files = tokenizer_files.files_of(config.data, max_length=limit)
        bos, eos = tokenizer_files.special_ids(config.data)
    for name, content in files.items():
        if (directory / name).is_file() and (directory / name).read_bytes() != content:
            raise UserError(f"{directory / name} exists with different content; export into an empty directory.")
    export_weights(params, config, directory / WEIGHTS, dtype=dtype, bos=bos, eos=eos)
    for name, content in files.items():
        with replacing(directory / name) as file:
            file.write(content)


def _require_fitting(family: Family, config: Config) -> None:
    data, alternative = config.data, "Or export with --weights_only."
    try:
        if data.tokenizer == tokenizer_files.HUGGINGFACE:  # it came with the imported model; its files are copied
            huggingface.directory_of(data.tokenizer_path)
            return
        size = load_tokenizer(data.tokenizer, data.tokenizer_path).vocab_size
    except UserError as error:
        raise UserError(f"There is no tokenizer to export. {error} {alternative}") from error
    if size > config.model.vocab_size:
        raise UserError(
            f"The run's {data.tokenizer} tokenizer has {size} ids, more than config.model.vocab_size="
            f"{config.model.vocab_size}, so it does not belong to the model. Export with --weights_only."
        )
    if family.own_tokenizer:
        raise UserError(
            f"transformers applies {family.name}'s tokenizer rules to any tokenizer.json, which gives other ids than "
            f"the run's {data.tokenizer} tokenizer. Export with --weights_only."
        )


def _with_tokenizer(config: Config, tokenizer: tuple[str, str]) -> Config:
    name, path = tokenizer
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=name, tokenizer_path=path))


SCHEME = "hf://"
INDEX = "model.safetensors.index.json"


def fetched(weights: str | os.PathLike[str]) -> Path:
    """Return `weights` as a local path; fetch a model of the Hugging Face hub into huggingface_hub's cache first.

    Fetches settings, tokenizer and .safetensors files only. Raises `UserError` if the package is missing, the service
    does not answer or the model does not exist.
    """
    text = os.fspath(weights)
    if not text:
        raise UserError("The model name is empty: give a directory (`.` is the current one) or hf://OWNER/NAME.")
    if not text.startswith(SCHEME):
        return Path(store.location(text))
    name, _, revision = text.removeprefix(SCHEME).partition("@")
    if not re.fullmatch(r"([\w.-]+/)?[\w.-]+", name):
        raise UserError(f"{text} is not a model name: write {SCHEME}OWNER/NAME or {SCHEME}OWNER/NAME@REVISION.")
    try:
        import huggingface_hub  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise UserError(
            f"{text} needs the package huggingface_hub: pip install 'seqjax[hf]'. Or give the path of a downloaded "
            "directory."
        ) from error
    small = _snapshot(huggingface_hub, text, name, revision or None, ["config.json", INDEX, *FILES])
    index = small / INDEX
    shards = sorted(set(weight_map(index).values())) if index.is_file() else []
    # The snapshot's folder is named after its commit, which the second step reads again.
    return _snapshot(huggingface_hub, text, name, small.name, shards or ["model.safetensors"])


def _snapshot(package: Any, text: str, name: str, revision: str | None, files: list[str]) -> Path:
    try:
        return Path(package.snapshot_download(name, revision=revision, allow_patterns=files))
    except Exception as error:  # of the package, of its HTTP client, or of the disk
        cause = (str(error).strip() or "no message").splitlines()[0]
        raise UserError(
            f"{text} could not be fetched ({type(error).__name__}: {cause}). Check the name and the network, log in "
            "for a gated model, or give the path of a downloaded directory."
        ) from error
