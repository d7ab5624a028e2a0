"""Find mixers by name: shipped, registered, in a file, or in a dotted module.

    mamba2               the file of that name in this package
    gema                 the class registered by `register("gema")`, or the only mixer in a file gema.py
    gema.py:GatedEma     a class in a file; the file may have a directory, `mine/gema.py:GatedEma`
    my_package.gema      the only mixer of an importable module

A file is searched in the config's directory and in the current directory. Once loaded, its mixer is called `gema` or
`gema.py:GatedEma`, without the directory, in this process, in config.json and in the copy that a run keeps.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import inspect
import math
import pkgutil
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

from flax import nnx

from seqjax import user_code
from seqjax.errors import UserError, nearest
from seqjax.fields import Bounds, optional
from seqjax.files import find_in_current_directory
from seqjax.mixers import base
from seqjax.nn.params import Template
from seqjax.types import Layer
from seqjax.user_code import Source

M = TypeVar("M")
PACKAGE = "seqjax.mixers"

_registered: dict[str, type[base.Mixer]] = {}
_sources: dict[type, Source] = {}  # registered class -> its source when it was registered
_by_file: set[str] = set()  # registered names that come from a file, not from `register`
_reading: contextvars.ContextVar[ModuleType | None] = contextvars.ContextVar("_reading", default=None)
_searching = contextvars.ContextVar("_searching", default=True)


def names() -> list[str]:
    """Return the names of the shipped mixers: their file names without suffix.

    base.py is the contract, and a leading underscore marks a file of shared code.
    """
    directory = Path(__file__).parent
    return list(_names_in(directory, directory.stat().st_mtime_ns))


@functools.lru_cache(maxsize=1)  # every config read calls this; a new file changes the directory's mtime
def _names_in(directory: Path, changed: int) -> tuple[str, ...]:
    del changed
    files = {module.name for module in pkgutil.iter_modules([str(directory)])} - {"base"}
    return tuple(sorted(name for name in files if not name.startswith("_")))


def known() -> list[str]:
    """Return the names that need no search: shipped and registered mixers."""
    return sorted({*names(), *_registered})


def is_shipped(name: str) -> bool:
    """Return whether mixer `name` is part of seqjax."""
    return name in names() or (is_dotted(name) and name.startswith(f"{PACKAGE}."))


def is_dotted(name: str) -> bool:
    """Return whether `name` is a dotted module name."""
    return "." in name and ":" not in name and not name.endswith(".py")


def is_foreign(name: str) -> bool:
    """Return whether loading `name` would run a file from outside seqjax.

    False for a registered name. A dotted module counts as foreign also after its import.
    """
    return not is_shipped(name) and name not in _registered


# ---------------------------------------------------------------------------------------------------- names and classes
def register(name: str) -> Callable[[M], M]:
    """Return a decorator that registers a class as mixer `name` in this process.

        @seqjax.mixers.register("ema")
        class Ema(seqjax.mixers.base.Mixer):
            def __init__(self, dim, *, expand=2, rngs):
            ...

    A config then selects the class with `mixer={"name": "ema"}`. A later class with the same name replaces it, as when
    a notebook cell runs again. A file that runs again unchanged keeps its class. Raises `UserError` for an unusable
    name, a class that breaks the contract, or two different files that register the same name.
    """
    if name in names() or not name.isidentifier():
        taken = "belongs to a mixer that ships with seqjax" if name in names() else "is not a Python identifier"
        raise UserError(f"A mixer cannot be registered as {name!r}, which {taken}; choose another name.")

    def decorate(mixer: M) -> M:
        checked: Any = _checked(mixer, f"The class registered as {name!r}")
        _by_file.discard(name)
        return _enter(name, checked)

    return decorate


def _enter(name: str, mixer: Any) -> Any:
    """Register a class, or return the registered class if its file is unchanged."""
    source, before = user_code.source_of(mixer), _registered.get(name)
    was = _sources.get(before) if before is not None else None
    if before is not None and source is not None and was is not None:
        if was.content == source.content and before.__name__ == mixer.__name__:
            return before
        _require_one_file(name, was, source)
    _registered[name] = mixer
    if source is not None:
        _sources[mixer] = source
    return mixer


def _require_one_file(name: str, first: Source, second: Source) -> None:
    if first.path != second.path and first.content != second.content:
        raise UserError(
            f"The mixer {name!r} is in two files with different content, {first.path} and {second.path}. Rename one of "
            "them and its mixer, or use them in separate processes."
        )


def load(name: str) -> type[base.Mixer]:
    """Return the class of mixer `name`.

    The mixer may be registered, shipped, in a user's file, or in a dotted module.
    """
    if name in _registered:
        return _registered[name]
    where = f"config.model.mixer.name={name!r}"
    if not is_dotted(name) and name not in names():
        return _registered[locate(name)]
    if not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"{where} is not the name of a Python module; write package.module, or FILE.py:CLASS.")
    if not is_shipped(name):
        find_in_current_directory()
    try:
        module = importlib.import_module(name if "." in name else f"{PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            raise UserError(
                f"{where}: no module {error.name!r} to import. Install it, or run the command in the module's "
                "directory."
            ) from error
        raise
    return _only_mixer(module, where)


def name_of(mixer: type[base.Mixer]) -> str:
    """Return the name by which a config selects a class.

    The name is registered, or comes from the imported file of the class. Raises `UserError` for a class without a file.
    """
    for name, registered in _registered.items():
        if registered is mixer:
            return name
    module = sys.modules.get(getattr(mixer, "__module__", ""))
    if module is not None and _mixers_of(module) == [mixer] and "." in module.__name__:
        return module.__name__.removeprefix(f"{PACKAGE}.")
    name, source = getattr(mixer, "__name__", repr(mixer)), user_code.source_of(mixer) if module else None
    if source is None:
        raise UserError(
            f"{name} has no name that a config can use: put @seqjax.mixers.register('a_name') above the class, or move "
            "it to a separate file (docs/add_a_mixer.md)."
        )
    called = f"{source.path.name}:{name}"
    _enter(called, _checked(mixer, f"The class {name}"))
    _by_file.add(called)
    return called


def use(mixers: Iterable[type[base.Mixer]]) -> None:
    """Register a user's classes under the names by which configs select them."""
    for mixer in mixers:
        if not is_shipped(name := name_of(mixer)):
            _registered.setdefault(name, mixer)


def class_named(name: str) -> type[base.Mixer] | None:
    """Return the shipped class `name`, or None.

    Its file has the class name in lower case, with or without underscores.
    """
    file = {file.replace("_", ""): file for file in names()}.get(name.lower())
    mixer = None if file is None else load(file)
    return mixer if mixer is not None and mixer.__name__ == name else None


def _mixers_of(module: ModuleType) -> list[type[base.Mixer]]:
    own = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__]
    return [x for x in own if issubclass(x, base.Mixer) and not x.__name__.startswith("_")]


def _only_mixer(module: ModuleType, where: str) -> type[base.Mixer]:
    classes = _mixers_of(module)
    if len(classes) != 1:
        which = ", ".join(mixer.__name__ for mixer in classes) or "none"
        raise UserError(
            f"{where}: {module.__file__} must define one class that derives from seqjax.mixers.base.Mixer, not {which} "
            "(docs/add_a_mixer.md). Select one of several as FILE.py:CLASS, or begin the names of base classes with "
            "an underscore."
        )
    return _checked(classes[0], f"{where}: {classes[0].__name__} of {module.__file__}")


def _checked(mixer: Any, who: str) -> type[base.Mixer]:
    if not (isinstance(mixer, type) and issubclass(mixer, base.Mixer)):
        raise UserError(f"{who} must derive from seqjax.mixers.base.Mixer (docs/add_a_mixer.md).")
    parameters = inspect.signature(mixer.__init__).parameters
    if list(parameters)[:2] != ["self", "dim"] or "rngs" not in parameters or "name" in parameters:
        raise UserError(
            f"{who} needs a constructor `def __init__(self, dim, *, SETTINGS, rngs)`, without a setting called name "
            "(docs/add_a_mixer.md)."
        )
    if missing := sorted(mixer.__abstractmethods__):
        raise UserError(f"{who} must define {' and '.join(missing)} (docs/add_a_mixer.md).")
    return mixer


# --------------------------------------------------------------------------------------------------- files of the user
@contextlib.contextmanager
def reading(config: ModuleType) -> Iterator[None]:
    """Return a context in which names are also searched in a config's file and directory."""
    token = _reading.set(config)
    try:
        yield
    finally:
        _reading.reset(token)


@contextlib.contextmanager
def as_registered() -> Iterator[None]:
    """Return a context in which a registered class is used as it is, even if its file has changed.

    The file of an unregistered name is still searched and run.
    """
    token = _searching.set(False)
    try:
        yield
    finally:
        _searching.reset(token)


def label(name: str) -> str:
    """Return a mixer's name without its file's directory.

    `mine/gema.py:GatedEma` becomes `gema.py:GatedEma`.
    """
    return Path(name).name if ":" in name else name


def locate(name: str) -> str:
    """Return the label of the mixer that a user has named.

    The mixer's file is read, and run if it is new or changed. Raises `UserError` if there is no such file or class, or
    if several files with this name differ in content.
    """
    where, config = f"config.model.mixer.name={name!r}", _reading.get()
    if name in names() and config is not None and Path(str(config.__file__)).stem == name and _mixers_of(config):
        raise UserError(
            f"{config.__file__} defines a mixer, but {where} is the mixer that ships with seqjax. Rename the file and "
            "its mixer."
        )
    if name in names() or is_dotted(name):
        return name
    file, _, cls = name.partition(":")
    if file.endswith(".py") != bool(cls) or not (cls or file).isidentifier():
        raise UserError(f"{where}: write FILE.py:CLASS, or the name of a mixer.{nearest(name, known())}")
    called = label(name)
    before = _registered.get(called)
    current = _current(called, file if cls else f"{file}.py", where)
    if current is None and before is None:
        raise UserError(_no_such(name, file, cls))
    was = _sources.get(before) if before is not None else None
    if current is None or (was is not None and was.content == current.content):
        return called
    if was is not None:
        _require_one_file(called, was, current)
        del _registered[called]
    module = config if config is not None and user_code.is_of(config, current) else _run(current)
    _take(module, called, cls, where)
    return called


def _current(called: str, file: str, where: str) -> Source | None:
    """Return the current source of a mixer's file.

    None if the class was registered without a file, or if there is no file.
    """
    before = _registered.get(called)
    if before is None or (_searching.get() and called in _by_file):
        return _find(file, where)
    was = _sources.get(before)
    if was is None or not (_searching.get() and user_code.has_run(before) and was.path.is_file()):
        return was
    return user_code.read(was.path)  # `register` gave the name, so the file may have any location


def load_copy(name: str, copy: Source) -> None:
    """Register mixer `name` of a run from the run's copy of its file.

    A class that is registered as `name` already stays. Raises `UserError` if the file does not define the mixer.
    """
    _take(_run(copy), name, name.partition(":")[2], f"config.model.mixer.name={name!r}")


def file_name(name: str) -> str:
    """Return the file name of a run's copy of mixer `name` (not a dotted module)."""
    return Path(name.partition(":")[0] if ":" in name else f"{name}.py").name


def sources(used: Iterable[str]) -> dict[str, Source]:
    """Return the users' files that define these mixers, as they were when run."""
    by_name = {name: _sources.get(_registered[name]) for name in used if name in _registered and not is_dotted(name)}
    return {name: source for name, source in by_name.items() if source is not None}


def source_hashes(used: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each mixer file from outside seqjax, by mixer name.

    Includes dotted modules.
    """
    used = [name for name in dict.fromkeys(used) if not is_shipped(name)]
    by_name = {name: user_code.source_of(load(name)) for name in used} | sources(used)
    return {name: source.sha256 for name, source in by_name.items() if source is not None}


def _run(source: Source) -> ModuleType:
    find_in_current_directory()
    return user_code.run(source, f"seqjax_mixer_{source.path.stem}")


def _take(module: ModuleType, name: str, cls: str, where: str) -> None:
    """Register a module's class `cls` as mixer `name`.

    Without `cls`, register the module's only mixer, unless `name` is registered: by the module's decorator, or by a
    module that ran earlier, if the caller has not removed its class.
    """
    if not cls:
        if name not in _registered:
            _enter(name, _only_mixer(module, where))
            _by_file.add(name)
        return
    if not hasattr(module, cls):
        classes = [mixer.__name__ for mixer in _mixers_of(module)]
        raise UserError(f"{where}: {module.__file__} has no class {cls!r}.{nearest(cls, classes)}")
    _enter(name, _checked(getattr(module, cls), f"{where}: {cls} of {module.__file__}"))
    _by_file.add(name)


def _find(file: str, where: str) -> Source | None:
    """Return the file in the config's or the current directory, or None."""
    config = _reading.get()
    places = [] if config is None else [Path(str(config.__file__)).parent]
    files = {(place / file).resolve() for place in (*places, Path.cwd())}
    first, *others = [user_code.read(path) for path in sorted(files) if path.is_file()] or [None]
    for other in others:
        if first is not None and other is not None and first.content != other.content:
            raise UserError(
                f"{where} is in two files with different content, {first.path} and {other.path}. Write the path of "
                "the file."
            )
    return first


def _no_such(name: str, file: str, cls: str) -> str:
    where = f"config.model.mixer.name={name!r}"
    if cls:
        return f"{where}: there is no file {file} in the config's directory or the current directory."
    return (
        f"{where} is not a mixer, and there is no {file}.py in the config's directory or the current directory "
        f"(docs/add_a_mixer.md).{nearest(name, known())}"
    )


# ------------------------------------------------------------------------------------------------- settings of a config
def settings_class(name: str) -> Any:
    """Return the frozen dataclass of a config's `model.mixer` group.

    Its fields are `name` and the settings of the mixer's constructor.
    """
    return _settings_class(load(name))


@functools.cache
def _settings_class(mixer: type[base.Mixer]) -> Any:
    fields: list[Any] = [("name", str)]
    for key, (hint, default) in base.settings_of(mixer.__init__).items():
        if optional(hint)[0] is int and typing.get_origin(hint) is not Annotated:
            hint = Annotated[hint, Bounds(-math.inf, 1 << 31)]  # the axis of an array, or a number of tokens
        required = default is inspect.Parameter.empty
        fields.append((key, hint) if required else (key, hint, dataclasses.field(default=default)))
    return dataclasses.make_dataclass(f"{mixer.__name__}Settings", fields, frozen=True, kw_only=True)


def build(settings: Any, dim: int, *, layer: Layer, rngs: nnx.Rngs) -> base.Mixer:
    """Return the mixer that a config's group `settings` describes, for one layer.

    `dim` is the model width.
    """
    mixer: Any = load(settings.name)
    own = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings) if field.name != "name"}
    if "layer" in inspect.signature(mixer.__init__).parameters:
        own["layer"] = layer
    return mixer(dim, **own, rngs=rngs)


def check(settings: Any, *, dim: int, n_layers: int, seq_len: int, path: str = "config.model.mixer") -> None:
    """Raise `UserError` if a mixer's settings do not fit each other or the model.

    No array is allocated. The error names a setting by its full key; `path` is the key of the mixer's group.
    """
    layer = Layer(n_layers=n_layers, max_len=seq_len)
    token = base.KEYS.set({"dim": "config.model.dim", "max_len": "config.train.seq_len"})
    try:
        _check(settings, load(settings.name), dim, layer)
    except UserError as error:
        raise UserError(f"{path}.{error}") from error
    finally:
        base.KEYS.reset(token)


@functools.lru_cache(maxsize=512)
def _check(settings: Any, mixer: type[base.Mixer], dim: int, layer: Layer) -> None:
    del mixer  # part of the key: a registered class may have been replaced
    template = Template(lambda rngs, index: build(settings, dim, layer=layer._replace(index=index), rngs=rngs))
    template.bind(template.shapes).check_length(layer.max_len)
