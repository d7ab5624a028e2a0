"""The config.json that lies beside public weights, held against ours on import and written on export."""

import json
import math
import operator
from pathlib import Path
from typing import Any

from seqjax.config import Config
from seqjax.convert.rules import MISSING, Family
from seqjax.errors import UserError


def same(a: Any, b: Any) -> bool:
    """Equal, numbers up to how they are written down."""
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    return math.isclose(a, b, rel_tol=1e-6) if numbers else a == b


def check_needs(family: Family, config: Config) -> None:
    """Raise `UserError` where `config` is not of the family's architecture."""
    wrong = []
    for key, allowed in family.needs.items():
        value = operator.attrgetter(key)(config)
        if value not in allowed:
            wrong.append(f"config.{key} must be {' or '.join(map(repr, allowed))}, not {value!r}")
    if wrong:
        raise UserError(f"{family.name} is another architecture than this config: {'; '.join(wrong)}.")


def check(family: Family, config: Config, path: Path) -> None:
    """Hold the config.json at `path`, if there is one, against ours; `UserError` lists what to override."""
    found = read(path)
    if found is None:
        return
    if found["model_type"] not in family.types:
        raise UserError(
            f"{path} is of a {found['model_type']!r}, but config.model.mixer.name={config.model.mixer.name!r} takes "
            f"{' or '.join(family.types)}. Give the --config of the right architecture."
        )
    wrong, fixes, mendable = [], [], True
    for setting in family.settings:
        try:
            value, ours = setting.read(found), setting.get(config)
        except KeyError as error:
            raise UserError(f"{path} has no {error.args[0]!r}, which {setting.public} needs.") from error
        if value is MISSING:
            continue
        fix, agree = setting.fix(value, found), same(value, ours)
        fixes += [fix] * bool(fix and (setting.derived or not agree))
        if not agree:
            said = f"{setting.public} is {value!r}, this config has {ours!r}"
            mendable &= bool(fix)
            wrong.append(f"{said} ({fix})" if fix else f"{said} and can have no other")
    if wrong:
        hint = f"\nAdd to --config: {','.join(fixes)}" if mendable else ""
        raise UserError(f"{path} is of another model than --config: {'; '.join(wrong)}.{hint}")


def read(path: Path) -> dict[str, Any] | None:
    """A public config.json, or None where `path` is no file or not of a public model."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); mend it, or take it away to go without its check.") from error
    return found if isinstance(found, dict) and "model_type" in found else None


def make(family: Family, config: Config, dtype: str) -> dict[str, Any]:
    """What goes into the config.json beside an export; `UserError` where one public key would need two values."""
    model_type, architecture = family.label(config)
    out: dict[str, Any] = {"architectures": [architecture], "dtype": dtype, "model_type": model_type}
    for setting in family.settings:
        value = setting.get(config)
        if not same(out.setdefault(setting.public, value), value):
            raise UserError(
                f"{family.name} has one {setting.public} for what is {out[setting.public]!r} and {value!r} here."
            )
    if "rope_theta" in out:  # where transformers looks since version 5
        out["rope_parameters"] = {"rope_type": "default", "rope_theta": out["rope_theta"]}
    return {name: value for name, value in sorted(out.items()) if value is not None}
