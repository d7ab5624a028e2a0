"""Locate a document's text, domain and source in row fields or folders.

The default layout is SlimPajama's: the domain is `meta.redpajama_set_name`, or, if a row lacks it, the innermost
directory named after a domain. Any other name is a fault.

With a layout setting, any name is a domain, and SlimPajama's set names still map to its domains. Other names are
converted to lower case, with a hyphen for each run of characters outside a-z, 0-9, _ and -. Names that become equal are
one domain.
"""

import dataclasses
import json
import re
import urllib.parse
from collections.abc import Iterable
from typing import Any, NamedTuple

from seqjax.data import slimpajama, splits
from seqjax.errors import UserError
from seqjax.reading import KINDS

SET_NAME_FIELD = "meta.redpajama_set_name"
SOURCE_FIELD, URL_FIELDS = "meta.source", ("meta.url", "url")
MAX_NAME_CHARS = 100
MAX_VALUE_CHARS = 60  # characters of a value in a message

_MISSING = object()


class BadLineError(Exception):
    """A line or row without a document.

    The message is the reason. `content` is the actual content and may be empty.
    """

    def __init__(self, reason: str, *, content: str = ""):
        super().__init__(reason)
        self.content = content


class Document(NamedTuple):
    """A document's domain, text and source (`source_of`)."""

    domain: str
    text: str
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The text field and the domain location; `meta.source` is a nested field."""

    text_field: str = "text"
    domain_field: str = ""  # this field's value is the domain
    domain_from: str = ""  # "folder": the first folder below the source that is not a split is the domain
    domain: str = ""  # one domain for all documents

    def __post_init__(self) -> None:
        domain_options = [f"--{key}" for key in ("domain_field", "domain_from", "domain") if getattr(self, key)]
        if len(domain_options) > 1:
            raise UserError(f"{' and '.join(domain_options)} both set the domain; give only one of them.")
        if self.domain_from not in ("", "folder"):
            raise UserError(f"--domain_from={self.domain_from} is not known; its only value is the word folder.")
        if not self.text_field:
            raise UserError("--text_field is empty; name the field of the text, e.g. --text_field=text.")
        if self.domain and clean(self.domain) != self.domain:
            example = f", e.g. --domain={clean(self.domain)}" if clean(self.domain) else ""
            raise UserError(f"--domain={self.domain}: a name consists of a-z, 0-9, _ and -{example}.")

    @property
    def is_slimpajama(self) -> bool:
        """Whether the only domains are SlimPajama's seven."""
        return not (self.domain_field or self.domain_from or self.domain)

    @property
    def reads_whole_files(self) -> bool:
        """Whether one-document files without fields have a domain."""
        return bool(self.domain_from or self.domain)

    def file_domain(self, name: str) -> str | None:
        """Return the domain of every row in file `name`, a path below the source.

        None if each row names its domain. In SlimPajama's layout this is the default for rows without a domain.
        """
        if self.domain:
            return self.domain
        folders = name.split("/")[:-1]
        if self.domain_from:
            return next((domain_name(part) for part in folders if not splits.named_split(part)), None) or None
        if self.domain_field:
            return None
        named = [slimpajama.BY_SET_NAME.get(part, part) for part in folders[::-1]]
        return next((domain for domain in named if domain in slimpajama.NAMES), None)

    def document(self, row: dict[str, Any], *, default: str | None) -> Document:
        """Return the document in a row; `default` is its `file_domain`.

        Raises `BadLineError` if the row holds no document.
        """
        text = self._text(row)
        domain = self._domain(row, default=default)
        return Document(domain, text, source_of(row, domain))

    def _domain(self, row: dict[str, Any], *, default: str | None) -> str:
        if default is not None and not self.is_slimpajama:
            return default
        if self.domain_from:
            raise BadLineError("no folder")
        field = self.domain_field or SET_NAME_FIELD
        value = field_of(row, field)
        if value is _MISSING or value is None:
            if default is None:
                raise BadLineError(f"no {field}", content=_fields(row))
            return default
        if self.is_slimpajama:
            domain = slimpajama.BY_SET_NAME.get(value) if isinstance(value, str) else None
            if domain is None:
                raise BadLineError("unknown set name", content=shown(value))
            return domain
        domain = domain_name(str(value)) if isinstance(value, str | int) else ""
        if not 0 < len(domain) <= MAX_NAME_CHARS:
            raise BadLineError(f"no name in {field}", content=shown(value))
        return domain

    def _text(self, row: dict[str, Any]) -> str:
        text = field_of(row, self.text_field)
        if text is _MISSING:
            reason = "no text" if self.text_field == "text" else f"no {self.text_field}"
            raise BadLineError(reason, content=_fields(row))
        if not isinstance(text, str):
            raise BadLineError(f"{self.text_field} is {_kind(text)}, not text")
        if not text.strip():
            raise BadLineError("empty document")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:  # "\ud800" is valid JSON but not text.
            raise BadLineError("not UTF-8") from None
        return text


SLIMPAJAMA = Layout()


def source_of(row: dict[str, Any], domain: str) -> str:
    """Return a document's source: a repository, package or web host; "" if unknown.

    The source is the part of `meta.source` before the first ":", as in "owner/repository:path". Without that part it is
    the host in `meta.url` or `url`. Among SlimPajama's domains, only commoncrawl and c4 use the host: elsewhere one
    host, such as arxiv.org, serves unrelated works.
    """
    named = field_of(row, SOURCE_FIELD)
    if isinstance(named, str):
        source, colon, rest = named.partition(":")
        if colon and source.strip() and not rest.startswith("//"):
            return source.strip()
    if domain in slimpajama.NAMES and domain not in ("commoncrawl", "c4"):
        return ""
    hosts = (_host(field_of(row, field)) for field in (*URL_FIELDS, SOURCE_FIELD))
    return next(filter(None, hosts), "")


def domain_name(value: str) -> str:
    """Return the domain that a field or folder names.

    "" if the name has no valid character.
    """
    return slimpajama.BY_SET_NAME.get(value) or clean(value)


def clean(value: str) -> str:
    """Return `value` reduced to the characters that a domain name may have."""
    return re.sub(r"[^a-z0-9_-]+", "-", value.lower()).strip("-")


def ordered(domains: Iterable[str]) -> list[str]:
    """Return domains in the order used by parts and manifests.

    SlimPajama's domains come first, then the rest by name.
    """
    rank = {name: i for i, name in enumerate(slimpajama.NAMES)}
    return sorted(domains, key=lambda name: (rank.get(name, len(rank)), name))


def shown(value: Any) -> str:
    """Return a value as message text, cut to `MAX_VALUE_CHARS` characters."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."


def field_of(row: dict[str, Any], name: str) -> Any:
    """Return a field's value; `_MISSING` if absent.

    `a.b` is a field with that name, or field `b` within `a`.
    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _kind(value: Any) -> str:
    return "binary" if isinstance(value, bytes) else KINDS.get(type(value), f"a {type(value).__name__}")


def _host(value: Any) -> str:
    """Return a URL's host, or "" if there is none."""
    try:
        return urllib.parse.urlsplit(value).hostname or "" if isinstance(value, str) else ""
    except ValueError:  # for example "http://["
        return ""


def _fields(row: dict[str, Any]) -> str:
    return shown(f"fields {', '.join(row)}" if row else "no fields")
