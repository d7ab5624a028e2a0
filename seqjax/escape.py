"""Escape text from users, files and models for terminals, Markdown, HTML and pictures.

A name, path, title or generated text may contain anything:

    * control characters that move the cursor
    * markup that forges a table row or runs a script
    * a `$` that starts a formula
    * a URL with a password

Every such text must pass through the function for its target language. Use `shlex` for shell commands and `repr` for
Python.
"""

import html as standard_html
import re

# C0 and C1 controls except line feed and tab, line separators, marks that change the text direction, and lone
# surrogates, which cannot be encoded.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LINE = re.compile(r"[\n\t]")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/{1,3}[^\s'\"<>]*")
_PASSWORD = re.compile(r"(:/{1,3})[^/?#]*:[^/?#]*@")
_TOKEN_AS_USER = re.compile(r"(https?:/{1,3})[^/?#]*@", re.IGNORECASE)
_SECRET = re.compile(r"([?&;][^=&;]*(?:token|sig|key|secret|pass|pwd|auth|cred)[^=&;]*=)[^&;#]*", re.IGNORECASE)
_MARKUP = re.compile(r"[\\`*\[\]<>|~$]|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])|^[-+](?![\d.])|^#|#$")
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def terminal(text: object) -> str:
    r"""Return text with control characters shown as `\x1b`; line feeds and tabs stay."""
    return _CONTROL.sub(_escaped, str(text))


def masked(text: object) -> str:
    """Return text with `***` in place of passwords and tokens in URLs."""

    def mask(match: re.Match[str]) -> str:
        url = _TOKEN_AS_USER.sub(r"\1***@", _PASSWORD.sub(r"\1***@", match[0]))
        return _SECRET.sub(r"\1***", url)

    return _URL.sub(mask, str(text))


def message(text: object) -> str:
    """Return text for a message, without control characters and passwords."""
    return terminal(masked(text))


def line(text: object) -> str:
    r"""Return `message(text)` on a single line; line feeds and tabs become `\n`, `\t`."""
    return _LINE.sub(_escaped, message(text))


def markdown(text: object) -> str:
    """Return text as plain Markdown words on a single line.

    It fits a paragraph, a list, a heading or a table cell.
    """
    return _NUMBERED.sub(r"\1\\\2", _MARKUP.sub(r"\\\g<0>", line(text).strip()))


def fenced(text: object, language: str = "") -> str:
    """Return text as a Markdown code block that its content cannot end."""
    shown = message(text)
    marks = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{marks}{language}\n{shown}\n{marks}"


def html(text: object) -> str:
    """Return text for HTML content or a quoted attribute value."""
    return standard_html.escape(line(text))


def plotly(text: object) -> str:
    """Return text for a name, label or hover template of plotly: no markup, and no value in place of `%{x}`."""
    return html(text).replace("%{", "%&#123;")


def picture(text: object) -> str:
    """Return text for a matplotlib title or label.

    `$` starts no formula, and a leading underscore does not hide the label from a legend.
    """
    shown = message(text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
