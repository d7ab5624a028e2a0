"""Converts public tensors to our parameters and back by a family's rules."""

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from seqjax.config import Config
from seqjax.convert import files, public_config
from seqjax.convert.attention import GPT2, LLAMA, QWEN2, QWEN3
from seqjax.convert.linear_attention import DELTANET, GATED_DELTANET, RWKV7
from seqjax.convert.mamba import MAMBA, MAMBA2
from seqjax.convert.rules import Family
from seqjax.errors import UserError
from seqjax.files import write_json
from seqjax.models import Model
from seqjax.nn.params import names
from seqjax.types import Params

FAMILIES: dict[str, tuple[Family, ...]] = {  # by mixer name
    "transformer": (GPT2,),
    "transformer_pp": (LLAMA, QWEN2, QWEN3),
    "mamba1": (MAMBA,),
    "mamba2": (MAMBA2,),
    "rwkv7": (RWKV7,),
    "deltanet": (DELTANET,),
    "gated_deltanet": (GATED_DELTANET,),
}
HEAD = "lm_head.weight"
SHOWN = 3  # number of wrong tensors per kind that an error lists


class Entry(NamedTuple):
    """A public tensor and the arrays of ours that it holds, for one config; `layer` is None outside the layers."""

    name: str
    shape: tuple[int, ...]
    form: str
    paths: tuple[str, ...]
    ours: tuple[tuple[int, ...], ...]
    layer: int | None

    @property
    def axis(self) -> int:
        """The axis along which our arrays are concatenated."""
        return 0 if self.form == "conv" else -1

    def to_public(self, arrays: list[np.ndarray]) -> np.ndarray:
        """Return the tensor that holds our arrays, contiguous in memory."""
        x = np.concatenate(arrays, axis=self.axis)
        x = x.T if self.form == "linear" else x
        # safetensors 0.5 writes a transposed view as if it were not transposed.
        return np.ascontiguousarray(x.reshape(self.shape))

    def to_ours(self, tensor: np.ndarray) -> list[np.ndarray]:
        """Return our arrays in the tensor."""
        sizes = [shape[self.axis] for shape in self.ours]
        joined_shape = list(self.ours[0])
        joined_shape[self.axis] = sum(sizes)
        x = tensor.T if self.form == "linear" else tensor.reshape(joined_shape)
        return np.split(x, np.cumsum(sizes)[:-1], axis=self.axis)


def family_of(config: Config) -> Family:
    """Return the public family of a config's architecture; raise `UserError` if there is none."""
    return public_config.family_for(families_of(config), config)


def families_of(config: Config) -> tuple[Family, ...]:
    """Return the public families of a config's mixer; raise `UserError` if there is none."""
    name = config.model.mixer_names
    if name not in FAMILIES:
        raise UserError(
            f"config.model.mixer.name={name!r} has no public architecture. Mixers that have one: {', '.join(FAMILIES)}."
        )
    return FAMILIES[name]


def import_weights(path: str | Path, config: Config) -> Params:
    """Return public weights as parameters of `config`'s model: float32 arrays on the host, layers stacked.

    Float16, bfloat16 and float32 files are read exactly. Raises `UserError` if a tensor is missing, unexpected, not
    finite or differs in shape, and if a config.json in the same directory describes another model (docs/convert.md).
    """
    families = families_of(config)
    with files.Weights(Path(path)) as weights:
        if config.model.n_layers > len(weights.names):
            raise UserError(
                f"{weights.path} has {len(weights.names):,} tensors, too few for config.model.n_layers="
                f"{config.model.n_layers:,}. Set it to the number of layers in the file."
            )
        family = public_config.check(families, config, weights.directory / "config.json")
        family.label(config)  # raises `UserError` for settings that an export could not express
        wanted = {entry.name: entry for entry in entries(family, config)}
        stored = _stored(family, weights.names, wanted)
        _check_tensors(family, config, weights, stored, wanted)
        flat = {path: np.zeros(shape, np.float32) for path, shape in _shapes(config).items()}
        for entry in wanted.values():
            for array_path, x in zip(entry.paths, entry.to_ours(weights.read(stored[entry.name])), strict=True):
                flat[array_path][... if entry.layer is None else entry.layer] = x
    return _nested(flat)


def export_weights(
    params: Params,
    config: Config,
    path: str | Path,
    *,
    dtype: str = "float32",
    bos: int | None = None,
    eos: int | None = None,
) -> None:
    """Write the parameters of `config`'s model to the .safetensors file `path` under public names, with a config.json.

    `dtype` is float32 (exact), bfloat16 or float16; `bos` and `eos` are the ids that start and end a text, if known.
    Raises `UserError` if the architecture has no public family, if a value is not finite, and if a config.json with
    other content exists.
    """
    path, family = Path(path), family_of(config)
    config_file, hf_config = path.parent / "config.json", public_config.make(family, config, dtype, bos=bos, eos=eos)
    if config_file.exists() and public_config.read(config_file) != hf_config:
        raise UserError(f"{config_file} exists with different content; export into an empty directory.")
    flat = {name: np.asarray(x, np.float32) for name, x in names(params)}
    tensors = {}
    for entry in entries(family, config):
        arrays = [flat[p] if entry.layer is None else flat[p][entry.layer] for p in entry.paths]
        tensors[entry.name] = entry.to_public(arrays)
    files.write(tensors, path, dtype=dtype)
    write_json(config_file, hf_config)


def entries(family: Family, config: Config) -> list[Entry]:
    """Return all public tensors for `config`'s model; raise `UserError` for an array without a tensor."""
    shapes = _shapes(config)
    out: list[Entry] = []
    mapped = set()
    for rule in family.rules:
        in_layer = "{}" in rule.public
        paths = tuple(f"blocks.0.{p}" if in_layer else p for p in rule.ours.split())
        if any(p not in shapes for p in paths):
            continue
        mapped |= set(paths)
        ours = tuple(shapes[p][1:] if in_layer else shapes[p] for p in paths)
        shape = _public_shape(rule.form, ours, config)
        for layer in range(0 if rule.first else 1, config.model.n_layers) if in_layer else [None]:
            out.append(Entry(rule.public.format(layer), shape, rule.form, paths, ours, layer))
    if unmapped := sorted(set(shapes) - mapped):
        shown = f"{', '.join(unmapped[:SHOWN])}{' ...' * (len(unmapped) > SHOWN)}"
        raise UserError(f"{family.name} has no tensor for {shown}; docs/convert.md lists the settings that convert.")
    return out


def _public_shape(form: str, ours: tuple[tuple[int, ...], ...], config: Config) -> tuple[int, ...]:
    if form == "conv":
        return (sum(s[0] for s in ours), 1, ours[0][1])
    shape = (*ours[0][:-1], sum(s[-1] for s in ours))
    if form == "heads":
        return (config.model.mixer.heads, shape[0] // config.model.mixer.heads)
    return {"same": shape, "linear": shape[::-1], "row": (1, 1, *shape)}[form]


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's arrays by path."""
    return {path: leaf.shape for path, leaf in names(Model(config.model, max_len=config.train.seq_len).shapes)}


def _stored(family: Family, stored_names: list[str], wanted: Iterable[str]) -> dict[str, str]:
    """Map public names to names in the file; in the file of a base model without head the prefix is missing."""
    full = {name if name == HEAD else family.prefix + name: name for name in stored_names}
    has_prefix = any(name.startswith(family.prefix) for name in stored_names)
    return {name: name for name in stored_names} if has_prefix or not full.keys() & set(wanted) else full


def _check_tensors(
    family: Family, config: Config, weights: files.Weights, stored: dict[str, str], wanted: dict[str, Entry]
) -> None:
    missing, unexpected = sorted(wanted.keys() - stored.keys()), stored.keys() - wanted.keys()
    unexpected = sorted(name for name in unexpected if not re.search(family.redundant, name))
    if HEAD in unexpected and config.model.tie_embeddings and family.embed in stored:
        head, embed = (weights.read(stored[name]) for name in (HEAD, family.embed))
        if head.shape != embed.shape or not (head == embed).all():
            raise UserError(
                f"{weights.path}: {HEAD} differs from {family.embed}, so the head is not tied. "
                "Set config.model.tie_embeddings=False."
            )
        unexpected.remove(HEAD)
    shapes = {name: weights.shape(stored[name]) for name in wanted.keys() & stored.keys()}
    wrong = sorted(name for name, shape in shapes.items() if shape != wanted[name].shape)
    candidates, expected = unexpected or sorted(stored), missing or sorted(wanted)
    problems = [
        _listed("missing", missing, lambda n: f"{list(wanted[n].shape)}{_nearest(n, candidates, 'in the file')}"),
        _listed(
            "not expected", unexpected, lambda n: f"{list(weights.shape(stored[n]))}{_nearest(n, expected, 'expected')}"
        ),
        _listed("wrong shape", wrong, lambda n: f"{list(shapes[n])}, expected {list(wanted[n].shape)}"),
    ]
    if any(problems):
        tied = " The head may be tied: config.model.tie_embeddings=True." * (missing == [HEAD])
        raise UserError(
            f"{weights.path} does not fit this config as a {family.name}: {'; '.join(filter(None, problems))}.{tied}"
        )


def _listed(problem: str, tensor_names: list[str], describe: Callable[[str], str]) -> str:
    if not tensor_names:
        return ""
    more = f" and {len(tensor_names) - SHOWN} more" if len(tensor_names) > SHOWN else ""
    return f"{problem}: {', '.join(f'{name} {describe(name)}' for name in tensor_names[:SHOWN])}{more}"


def _nearest(name: str, known: list[str], where: str) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (nearest {where}: {close[0]})" if close else ""


def _nested(flat: dict[str, np.ndarray]) -> Params:
    tree: Params = {}
    for path, x in flat.items():
        *groups, last = path.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[last] = x
    return tree
