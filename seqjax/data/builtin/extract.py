"""Collect text that every installation has: standard library and dependencies.

There are five domains, none from SlimPajama:

    prose      docstrings, READMEs, package descriptions, the Python language reference
    doctest    docstrings with at least three `>>>` prompts
    math_docs  docstrings with at least two TeX formulas
    python     source files without their docstrings
    c_code     C and C++ sources and headers

Tests, vendored code and generated tables are left out, and duplicates are kept once. `python` and `c_code` are only
evaluated, so their size is capped. Only required dependencies are read, so installed extras change nothing. Docstrings
are found with a regular expression, because parsing 100 MB of source takes a minute.
"""

import dataclasses
import hashlib
import inspect
import re
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

# The requirements in pyproject.toml. Indirect requirements, such as scipy, are read from package metadata.
ROOTS = (
    "absl-py",
    "array_record",
    "flax",
    "fsspec",
    "grain",
    "jax",
    "jaxtyping",
    "matplotlib",
    "ml_collections",
    "numpy",
    "optax",
    "orbax-checkpoint",
    "tensorboardX",
    "zstandard",
)
DOMAINS = ("prose", "doctest", "math_docs", "python", "c_code")
CAPS = {"python": 3_000_000, "c_code": 2_000_000}  # bytes
MIN_CHARS, MAX_CHARS = 200, 60_000

_SKIP_PARTS = re.compile(
    r"(^|/)(tests?|testing|_?vendor(ed)?|third_party|external|_?extern|site-packages|dist-packages|idlelib|lib2to3"
    r"|test_[^/]*|[^/]*_test\.py"
    r"|[^/]*_pb2\.pyi?|conftest\.py|turtledemo|ensurepip|licenses?|unicode_data|encodings|__pycache__)(/|$)"
)
# A docstring follows a line that ends in a colon or a comma (numpy's add_newdoc), or the first comments in a file.
_DOCSTRING = re.compile(
    r"""(?:\A(?:[ \t]*\#[^\n]*\n|\s)*|[:,][ \t]*(?:\#[^\n]*)?\n\s*)([rRuU]?)(\"{3}|'{3})(.*?)\2""", re.S
)
# Thousands of files repeat their licence headers.
_PYTHON_HEADER = re.compile(r"\A(?:\#[^\n]*\n|\s)*")
_C_HEADER = re.compile(r"\A(?:/\*.*?\*/|//[^\n]*\n|\s)*", re.S)
_CODE_SUFFIXES = {".h", ".c", ".hpp", ".cc", ".cpp", ".cuh"}


@dataclasses.dataclass(frozen=True)
class Document:
    """A text with its domain and its package."""

    domain: str
    package: str
    text: str

    @property
    def digest(self) -> bytes:
        """Hash of the text without case and white space.

        It identifies duplicates and orders the documents.
        """
        return hashlib.sha1("".join(self.text.lower().split()).encode("utf-8", "replace")).digest()


def distributions() -> dict[str, metadata.Distribution]:
    """Return seqjax's required dependencies, direct and indirect, by normalised name."""
    dists: dict[str, metadata.Distribution] = {}
    queue: list[str] = list(ROOTS)
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in dists:
            continue
        try:
            dists[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # Another platform or Python version requires it.
        for requirement in dists[name].requires or []:
            specifier, _, marker = requirement.partition(";")
            match = re.match(r"[\w.-]+", specifier)
            if match and "extra" not in marker:
                queue.append(match[0])
    return dict(sorted(dists.items()))


def documents(dists: dict[str, metadata.Distribution]) -> list[Document]:
    """Return all documents without duplicates.

    Their order depends only on their texts.
    """
    unique: dict[bytes, Document] = {}
    sizes: dict[str, int] = dict.fromkeys(DOMAINS, 0)
    files = sorted(_files(dists), key=lambda item: hashlib.sha1(item[1].encode()).digest())
    for package, name, path in files:
        suffix = path.suffix
        for domain, text in _documents(path, name, include_source=sizes["python"] < CAPS["python"]):
            if suffix in _CODE_SUFFIXES and sizes["c_code"] >= CAPS["c_code"]:
                continue
            document = Document(domain, package, text)
            if unique.setdefault(document.digest, document) is document:
                sizes[domain] += len(text)
    return [unique[digest] for digest in sorted(unique)]


def _files(dists: dict[str, metadata.Distribution]) -> Iterator[tuple[str, str, Path]]:
    """Yield (package, name, path) for every relevant file.

    Names do not depend on the installation directory.
    """
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in stdlib.rglob("*.py"):
        name = path.relative_to(stdlib).as_posix()
        if not _SKIP_PARTS.search(name):
            yield f"python/{Path(name).parts[0].removesuffix('.py')}", name, path
    include = Path(sysconfig.get_path("include"))
    for path in include.rglob("*.h"):
        yield "python/include", f"include/{path.relative_to(include).as_posix()}", path
    for dist_name, dist in dists.items():
        for file in dist.files or []:
            name = file.as_posix()
            if file.suffix not in _CODE_SUFFIXES | {".py", ".rst", ".md"} and file.name != "METADATA":
                continue
            if name.startswith("..") or _SKIP_PARTS.search(name):
                continue
            package = f"{dist_name}/{file.parts[1]}" if len(file.parts) > 2 else dist_name
            yield package, name, Path(str(file.locate()))


def _documents(path: Path, name: str, *, include_source: bool) -> Iterator[tuple[str, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    text = text.replace("\r\n", "\n")
    if path.name == "METADATA":
        yield from _classified(text.partition("\n\n")[2])
    elif path.suffix in (".rst", ".md"):
        yield from _classified(text)
    elif path.suffix in _CODE_SUFFIXES:
        text = _C_HEADER.sub("", text)
        if MIN_CHARS <= len(text) <= MAX_CHARS:
            yield "c_code", text
    elif name == "pydoc_data/topics.py":
        scope: dict[str, dict[str, str]] = {}
        exec(text, scope)  # the standard library's reference texts, a single dict
        for topic in scope["topics"].values():
            yield from _classified(topic)
    else:
        for prefix, _, body in _DOCSTRING.findall(text):
            raw = prefix in ("r", "R") or "\\" not in body
            yield from _classified(inspect.cleandoc(body if raw else body.replace("\\\\", "\\")))
        if include_source and MIN_CHARS <= len(text) <= MAX_CHARS:
            code = _DOCSTRING.sub(lambda match: match[0][: match.start(3) - match.start()] + match[2], text)
            code = _PYTHON_HEADER.sub("", code)
            if len(code) >= MIN_CHARS:
                yield "python", code


def _classified(text: str) -> Iterator[tuple[str, str]]:
    text = text.strip()
    if not MIN_CHARS <= len(text) <= MAX_CHARS:
        return
    if text.count(":math:") + text.count(".. math::") >= 2:
        yield "math_docs", text
    elif text.count(">>>") >= 3:
        yield "doctest", text
    elif sum(map(text.count, " etaoin")) > 0.45 * len(text):  # tables, name lists and code have a lower share
        yield "prose", text
