"""The config.json of public weights: compared with our config on import, written on export."""

import math
import operator
from pathlib import Path
from typing import Any, NamedTuple

from seqjax import reading
from seqjax.config import Config
from seqjax.convert.rules import ALSO_READ, ANY, MISSING, SIZE, Family
from seqjax.errors import UserError

FIX = "fix it, or remove it to skip the check"
UNSUPPORTED = " and does not support that value"


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal, numbers up to rounding in the last digits."""
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    try:
        return math.isclose(a, b, rel_tol=1e-6) if numbers else a == b
    except OverflowError:  # an integer beyond all floats
        return a == b


def family_for(families: tuple[Family, ...], config: Config) -> Family:
    """Return the family that matches `config`'s architecture.

    Raises `UserError` if none matches; the error describes the family that needs the fewest changes.
    """
    family = min(families, key=lambda family: len(_unmet(family, config)))
    if wrong := _unmet(family, config):
        reasons = "; ".join(text for _, text in wrong.values())
        raise UserError(f"This config is not a {family.name}: {reasons}.")
    return family


def _unmet(family: Family, config: Config) -> dict[str, tuple[Any, str]]:
    """Return, by key, a family's unmet requirements: the required value and a sentence."""
    wrong = {}
    for key, allowed in family.needs.items():
        value = operator.attrgetter(key)(config)
        if value not in allowed:
            wrong[key] = (allowed[0], f"config.{key} must be {' or '.join(map(repr, allowed))}, not {value!r}")
    return wrong


class Comparison(NamedTuple):
    """Differences between a public config.json and ours, our overrides, and whether the overrides suffice."""

    wrong: list[str]
    fixes: dict[str, Any]
    fixable: bool


def as_text(settings: dict[str, Any]) -> str:
    """Return overrides as text that follows a name in --config."""
    return ",".join(f"{key}={value}" for key, value in settings.items())


def check(families: tuple[Family, ...], config: Config, path: Path) -> Family:
    """Compare the config.json at `path` with ours and return the family that it names.

    Without a config.json, returns `config`'s family. Raises a `UserError` that lists overrides if the two differ.
    """
    hf_config = read(path)
    if hf_config is None:
        return family_for(families, config)
    named = [family for family in families if hf_config["model_type"] in family.types]
    if not named:
        types = [kind for family in families for kind in family.types]
        raise UserError(
            f"{path} has model_type {hf_config['model_type']!r}, but config.model.mixer.name="
            f"{config.model.mixer.name!r} imports {' or '.join(types)}. Give the --config for this architecture."
        )
    wrong, fixes, fixable = _compare(named[0], config, hf_config, path)
    if wrong:
        hint = f"\nAdd to --config: {as_text(fixes)}" if fixable else ""
        raise UserError(f"{path} and --config describe different models: {'; '.join(wrong)}.{hint}")
    return named[0]


def overrides(family: Family, config: Config, path: Path) -> dict[str, Any]:
    """Return the overrides that turn `config`, any config of the mixer, into the model of the config.json at `path`.

    Values are numbers, booleans and names known to seqjax. Raises `UserError` for unsupported features and missing
    sizes.
    """
    hf_config = read(path) or {}
    absent = [
        setting.public for setting in family.settings if setting.required and hf_config.get(setting.public) is None
    ]
    if absent:
        raise UserError(f"{path} has no {' and no '.join(absent)}, so the model's size is unknown. Give --config.")
    wrong, fixes, fixable = _compare(family, config, hf_config, path)
    if not fixable:
        unsupported = [text for text in wrong if text.endswith(UNSUPPORTED)]
        raise UserError(f"{path} describes a model that seqjax does not support: {'; '.join(unsupported)}.")
    if length := hf_config.get("max_position_embeddings"):  # positions are computed, so no table fixes the length
        fixes["train.seq_len"] = length
    large = [f"{key}={n}" for key, n in fixes.items() if isinstance(n, int) and n >= SIZE.stop]
    if large:
        raise UserError(f"{path} describes a model too large for any device: {', '.join(large)}. Download it again.")
    return fixes


def _compare(family: Family, config: Config, hf_config: dict[str, Any], path: Path) -> Comparison:
    wrong: list[str] = []
    fixes: dict[str, Any] = {}
    fixable = True
    forms = {f"{setting.public}?": (setting.form, None) for setting in family.settings if setting.form is not ANY}
    reading.check(hf_config, ALSO_READ | forms, path, fix=FIX)
    required = {setting.public for setting in family.settings if setting.required}
    hf_config = {key: value for key, value in hf_config.items() if value is not None or key not in required}
    for setting in family.settings:
        try:
            value, ours = setting.read(hf_config), setting.get(config)
            fix = {} if value is MISSING else setting.fix(value, hf_config)
        except KeyError as error:
            raise UserError(f"{path} has no {error.args[0]!r}, which {setting.public} needs; {FIX}.") from error
        except OverflowError as error:
            raise UserError(f"{path}: {setting.public} is too large ({error}); {FIX}.") from error
        if value is MISSING:
            continue
        agree = same(value, ours)
        fixes |= fix if setting.derived or not agree else {}
        if not agree:
            difference = f"{setting.public} is {value!r:.200}, this config has {ours!r}"
            fixable &= bool(fix)
            wrong.append(f"{difference} ({as_text(fix)})" if fix else f"{difference}{UNSUPPORTED}")
    unmet = _unmet(family, config)
    fixes = {key: value for key, (value, _) in unmet.items() if key not in fixes} | fixes
    return Comparison([*(text for _, text in unmet.values()), *wrong], fixes, fixable)


def read(path: Path) -> dict[str, Any] | None:
    """Return a public config.json, or None if `path` is not a file or not the config of a public model."""
    if not path.is_file():
        return None
    hf_config = reading.read_json(path, {"model_type?": str}, fix=FIX)
    return hf_config if "model_type" in hf_config else None


def make(
    family: Family, config: Config, dtype: str, *, bos: int | None = None, eos: int | None = None
) -> dict[str, Any]:
    """Return the config.json of an export; raise `UserError` if one public key would need two values.

    `bos` and `eos` are the ids that start and end a text. Unknown ids are null, because the defaults of the public
    classes belong to other vocabularies. The padding id is null: our vocabularies have no padding.
    """
    model_type, architecture = family.label(config)
    out: dict[str, Any] = {"architectures": [architecture], "dtype": dtype, "model_type": model_type}
    for setting in family.settings:
        value = setting.get(config)
        if not same(out.setdefault(setting.public, value), value):
            raise UserError(
                f"{family.name} has one {setting.public}, and this config has {out[setting.public]!r} and {value!r}. "
                "Train with one value to export the run."
            )
    if "rope_theta" in out:  # transformers reads this key since version 5
        scaling = out["rope_scaling"] or {"rope_type": "default"}
        out["rope_parameters"] = {**scaling, "rope_theta": out["rope_theta"]}
    stated = {name: value for name, value in out.items() if value is not None}
    return dict(sorted({**stated, "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": None}.items()))
