"""Tokenizers of public models: copied on import, written as `tokenizer.json` on export.

Byte tokenizers and sentencepiece BPE vocabularies (for example Mixtral's) become a `tokenizer.json` with equal ids. BPE
merges are all splits of a piece into two pieces, in sentencepiece's order of preference: by score, then the longer left
part first. An export names its tokenizer in `tokenizer_config.json`. An import then restores our tokenizer instead
of a copy that needs another package.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from seqjax.config import DataConfig
from seqjax.data import huggingface
from seqjax.data.tokenizer import ByteTokenizer, MixtralTokenizer, Tokenizer, load_tokenizer
from seqjax.errors import UserError
from seqjax.files import replacing
from seqjax.reading import content, read_json

HUGGINGFACE = huggingface.HuggingFaceTokenizer.name
CONFIG = "tokenizer_config.json"
SENTENCEPIECE = "tokenizer.model"
# Tokenizer files of a public directory; each holds data, no code.
FILES = (
    huggingface.FILE,
    CONFIG,
    SENTENCEPIECE,
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
OURS = "seqjax"  # key of tokenizer_config.json: our name for the tokenizer in tokenizer.json, and the file's sha256
SPACE = "\u2581"


# -------------------------------------------------------------------------------------------------------------- import
def find(directory: Path) -> tuple[str, str] | None:
    """Return `data.tokenizer` and `data.tokenizer_path` for the tokenizer in a public directory, or None without one.

    Raises `UserError` for a tokenizer whose ids would differ here.
    """
    model = directory / SENTENCEPIECE
    if (directory / huggingface.FILE).is_file():
        ours = _ours(directory / CONFIG)
        unchanged = ours.get("sha256") == hashlib.sha256(content(directory / huggingface.FILE)).hexdigest()
        if unchanged and ours.get("tokenizer") in (ByteTokenizer.name, MixtralTokenizer.name):
            return ours["tokenizer"], str(model) if model.is_file() else ""
        return HUGGINGFACE, str(directory)
    if not model.is_file():
        return None
    if (directory / "added_tokens.json").is_file():
        raise UserError(
            f"{directory}: added_tokens.json adds tokens to {SENTENCEPIECE}. Save the tokenizer once with transformers "
            f"as {huggingface.FILE}, which includes both."
        )
    return MixtralTokenizer.name, str(model)


def copy(source: Path, destination: Path) -> None:
    """Copy a public tokenizer's files and config.json, which may hold the special ids."""
    destination.mkdir(parents=True, exist_ok=True)
    for name in (*FILES, "config.json"):
        if (source / name).is_file():
            with replacing(destination / name) as copied:
                copied.write(content(source / name))


# -------------------------------------------------------------------------------------------------------------- export
def special_ids(data: DataConfig) -> tuple[int | None, int | None]:
    """Return the ids that start and end a text, for a config.json."""
    if data.tokenizer == HUGGINGFACE:  # reading the files needs no package
        return huggingface.special_ids(huggingface.directory_of(data.tokenizer_path))
    tokenizer = load_tokenizer(data.tokenizer, data.tokenizer_path)
    return tokenizer.bos, tokenizer.eos


def files_of(data: DataConfig, *, max_length: int | None) -> dict[str, bytes]:
    """Return names and contents of the files that make transformers produce the ids of `data`'s tokenizer.

    `max_length` is the model's longest text in tokens, None for no limit. Raises `UserError` for a missing package and
    for a sentencepiece model other than BPE.
    """
    if data.tokenizer == HUGGINGFACE:
        source = huggingface.directory_of(data.tokenizer_path)
        return {name: content(source / name) for name in FILES if (source / name).is_file()}
    tokenizer = load_tokenizer(data.tokenizer, data.tokenizer_path)
    out: dict[str, bytes] = {}
    if isinstance(tokenizer, MixtralTokenizer):
        spec, special = _sentencepiece(tokenizer)
        if data.tokenizer_path:
            out[SENTENCEPIECE] = content(data.tokenizer_path)
    else:
        spec, special = _bytes(tokenizer)
    out[huggingface.FILE] = (json.dumps(spec, ensure_ascii=False) + "\n").encode()
    settings = {
        **special,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length or int(1e30),
        # transformers' class for LlamaForCausalLM would replace the normalizer and change the ids.
        "tokenizer_class": "PreTrainedTokenizerFast",
        # "</s>" in a text does not end the document: both of our tokenizers read it as text.
        "split_special_tokens": True,
        OURS: {"tokenizer": tokenizer.name, "sha256": hashlib.sha256(out[huggingface.FILE]).hexdigest()},
    }
    out[CONFIG] = _json(settings)
    out["generation_config.json"] = _json({"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos})
    return out


def _bytes(tokenizer: Tokenizer) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a tokenizer.json for bytes, written in GPT-2's alphabet, and its special tokens."""
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    special = {names["bos_token"]: tokenizer.bos, names["eos_token"]: tokenizer.eos}
    # GPT-2's alphabet: printable Latin-1 bytes map to themselves, other bytes to characters from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte if byte in printable else 256 + shifted.index(byte)): byte for byte in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": alphabet | special, "merges": [], "byte_fallback": False}
    return _spec(model, special, names["bos_token"], pre_tokenizer=level, decoder=level), names


def _sentencepiece(tokenizer: MixtralTokenizer) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a tokenizer.json for a sentencepiece model, and its special tokens."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    proto.ParseFromString(tokenizer.serialized())
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    needed = {
        "BPE": trainer.model_type == trainer.BPE,
        "no normalizer": not normalizer.precompiled_charsmap,
        "byte fallback": trainer.byte_fallback,
        "a space before the text": normalizer.add_dummy_prefix and not trainer.treat_whitespace_as_suffix,
        "unchanged spaces": not normalizer.remove_extra_whitespaces and normalizer.escape_whitespaces,
        "no user-defined pieces": all(piece.type != piece.USER_DEFINED for piece in proto.pieces),
    }
    if unmet := [requirement for requirement, met in needed.items() if not met]:
        raise UserError(
            f"The sentencepiece model has no exact tokenizer.json, which requires {', '.join(unmet)}. Export with "
            "--weights_only and distribute the model file."
        )
    vocab = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == piece.NORMAL}
    merges = [
        (-score, -cut, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    merges.sort(key=lambda merge: merge[:2])
    names = {
        f"{kind}_token": proto.pieces[i].piece
        for kind, i in (("bos", tokenizer.bos), ("eos", tokenizer.eos), ("unk", trainer.unk_id))
    }
    special = {piece.piece: i for i, piece in enumerate(proto.pieces) if piece.type in (piece.CONTROL, piece.UNKNOWN)}
    model = {
        "type": "BPE",
        "unk_token": names["unk_token"],
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": vocab,
        "merges": [[left, right] for _, _, left, right in merges],
    }
    normalizers = [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ]
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    spec = _spec(
        model,
        special,
        names["bos_token"],
        normalizer={"type": "Sequence", "normalizers": normalizers},
        decoder={"type": "Sequence", "decoders": decoders},
    )
    return spec, names


def _spec(
    model: dict[str, Any],
    special: dict[str, int],
    bos: str,
    *,
    decoder: dict[str, Any],
    normalizer: dict[str, Any] | None = None,
    pre_tokenizer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a tokenizer.json that puts `bos` before a text, like our training documents."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    start = {"SpecialToken": {"id": bos, "type_id": 0}}
    first, second = ({"Sequence": {"id": which, "type_id": i}} for i, which in enumerate("AB"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": text, **flags} for text, i in sorted(special.items(), key=lambda x: x[1])
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, first],
            "pair": [start, first, second],
            "special_tokens": {bos: {"id": bos, "ids": [special[bos]], "tokens": [bos]}},
        },
        "decoder": decoder,
        "model": model,
    }


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _ours(path: Path) -> dict[str, Any]:
    """Return our entry in a tokenizer_config.json; an empty dict without an entry in the form that an export writes."""
    try:
        return read_json(path, {OURS: {"tokenizer": str, "sha256": str}})[OURS]
    except UserError:
        return {}
