"""Models on the Hugging Face hub, `hf://OWNER/NAME[@REVISION]`, fetched by the package `huggingface_hub`."""

import json
import os
import re
from pathlib import Path
from typing import Any

from seqjax.convert.tokenizer_files import FILES
from seqjax.errors import UserError

SCHEME = "hf://"
INDEX = "model.safetensors.index.json"


def fetched(weights: str | os.PathLike[str]) -> Path:
    """Return `weights` as a local path; what is on the hub is fetched first, into the package's own cache.

    Of a repository only the settings, the tokenizer and the .safetensors files of the model are fetched. Raises
    `UserError` if the package is missing or if the hub does not answer or has no such model.
    """
    text = os.fspath(weights)
    if not text.startswith(SCHEME):
        return Path(text)
    name, _, revision = text.removeprefix(SCHEME).partition("@")
    if not re.fullmatch(r"([\w.-]+/)?[\w.-]+", name):
        raise UserError(f"{text} is not the name of a model: write {SCHEME}OWNER/NAME or {SCHEME}OWNER/NAME@REVISION.")
    try:
        import huggingface_hub  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise UserError(
            f"{text} needs the package huggingface_hub: pip install 'seqjax[hf]'. Or give the path of a directory into "
            "which the model has been downloaded."
        ) from error
    small = _snapshot(huggingface_hub, text, name, revision or None, ["config.json", INDEX, *FILES])
    index = small / INDEX
    try:
        shards = (
            sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())) if index.is_file() else []
        )
    except (ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{index} is not the index of sharded weights ({error!r}).") from error
    # The snapshot's folder is named after its commit, so that both steps are of the same one.
    return _snapshot(huggingface_hub, text, name, small.name, shards or ["model.safetensors"])


def _snapshot(package: Any, text: str, name: str, revision: str | None, files: list[str]) -> Path:
    try:
        return Path(package.snapshot_download(name, revision=revision, allow_patterns=files))
    except Exception as error:  # of the package, of its HTTP client, or of the disk
        cause = (str(error).strip() or "no message").splitlines()[0]
        raise UserError(
            f"{text} could not be fetched ({type(error).__name__}: {cause}). Check the name and the network, log in "
            "for a model that asks for it, or give the path of a downloaded directory."
        ) from error
