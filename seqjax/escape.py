"""Text of users, files and models inside another language: a terminal, Markdown, HTML, or the labels of pictures.

A name, a path, a title or a generated text may hold anything: control characters that move the cursor, markup that
forges a row of a table or runs a script, `$` that starts a formula, or a URL with a password. Every such text goes
through the function of the language that it enters. Shell commands use `shlex`, Python uses `repr`.
"""

import html as standard_html
import re

# C0 and C1 controls without line feed and tab, line separators, marks that reverse the direction of text, and halves of
# surrogate pairs, which no file can hold.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LINE = re.compile(r"[\n\t]")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/{1,3}[^\s'\"<>]*")
_PASSWORD = re.compile(r"(:/{1,3})[^/?#]*:[^/?#]*@")
_TOKEN_AS_USER = re.compile(r"(https?:/{1,3})[^/?#]*@", re.IGNORECASE)
_SECRET = re.compile(r"([?&;][^=&;]*(?:token|sig|key|secret|pass|pwd|auth|cred)[^=&;]*=)[^&;#]*", re.IGNORECASE)
_MARKUP = re.compile(r"[\\`*\[\]<>|~$]|&(?=#?\w+;)|(?<![^\W_])_|_(?![^\W_])|^[-+](?![\d.])|^#|#$")
_NUMBERED = re.compile(r"^(\d+)([.)])(?=\s|$)")


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


def terminal(text: object) -> str:
    r"""Return text without control characters, which are shown as `\x1b`; line feeds and tabs stay."""
    return _CONTROL.sub(_escaped, str(text))


def masked(text: object) -> str:
    """Return text with `***` for the passwords and tokens in its URLs."""

    def mask(found: re.Match[str]) -> str:
        url = _TOKEN_AS_USER.sub(r"\1***@", _PASSWORD.sub(r"\1***@", found[0]))
        return _SECRET.sub(r"\1***", url)

    return _URL.sub(mask, str(text))


def message(text: object) -> str:
    """Return text for a message: without control characters and passwords."""
    return terminal(masked(text))


def line(text: object) -> str:
    r"""Return `message(text)` on a single line: line feeds and tabs are shown as `\n` and `\t`."""
    return _LINE.sub(_escaped, message(text))


def markdown(text: object) -> str:
    """Return text as plain words of Markdown on a single line, for a paragraph, a list, a heading or a cell."""
    return _NUMBERED.sub(r"\1\\\2", _MARKUP.sub(r"\\\g<0>", line(text).strip()))


def fenced(text: object, language: str = "") -> str:
    """Return text as a block of code in Markdown, which nothing in it can end."""
    shown = message(text)
    marks = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{marks}{language}\n{shown}\n{marks}"


def html(text: object) -> str:
    """Return text for an HTML page: its content, or the value of an attribute in quotes."""
    return standard_html.escape(line(text))


def plotly(text: object) -> str:
    """Return text for a name, label or hover template of plotly: no markup, and no value in place of `%{x}`."""
    return html(text).replace("%{", "%&#123;")


def picture(text: object) -> str:
    """Return text for a title or label of matplotlib: no formula between two `$`, no label that a legend leaves out."""
    shown = message(text).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
