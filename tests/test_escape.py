"""Untrusted text in terminals, Markdown, HTML and pictures, parsed back by renderers."""

import html
import html.parser
import io
import warnings
from typing import Any

import pytest
from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from seqjax import escape
from seqjax.terminal import tell

WORDS = ("top1_chunk", "Top-1 Chunk, k=4", "a & b", "-0.5", "2.5", "C++", "x_1", "1 of 3")
MARKUP = (
    "<script>alert(1)</script>", "[a](javascript:b)", "![a](b)", "`a`", "**a**", "_a_", "a | b", "# a", "- a", "+ a",
    "1. a", "12) a", "&lt;", "a\\", "~~a~~", "$x$", "<!-- a", "a #", "---",
)  # fmt: skip
CONTROLS = ("\x1b[31mred", "a\rb", "a\bb", "\x9b2J", "a\u202eb", "\x00", "\x7f", "a\u2028b", "\udce4")
URLS = {
    "https://user:pw@host/a": "https://***@host/a",
    "https://user:p@w@host/a": "https://***@host/a",
    "https://gh_pw@host/a": "https://***@host/a",
    "cannot read 'https:/user:pw@host/a'.": "cannot read 'https:/***@host/a'.",
    "simplecache::ftp://user:pw@host": "simplecache::ftp://***@host",
    "zip://a::https://gh_pw@host": "zip://a::https://***@host",
    "http://[::1]/a?token=pw": "http://[::1]/a?token=***",
    "https://host/a?sig=pw&part=1": "https://host/a?sig=***&part=1",
    "https://host/a?X-Amz-Signature=pw#end": "https://host/a?X-Amz-Signature=***#end",
    "abfss://container@account.dfs.core.windows.net/a": "abfss://container@account.dfs.core.windows.net/a",
    "gs://bucket/a and b@c": "gs://bucket/a and b@c",
}


@pytest.mark.parametrize("text", WORDS)
def test_usual_names_are_unchanged(text):
    assert escape.markdown(text) == escape.terminal(text) == escape.picture(text) == text


@pytest.mark.parametrize("text", CONTROLS)
def test_control_characters_are_escaped(text):
    for shown in (escape.terminal(text), escape.message(text), escape.markdown(text), escape.html(text)):
        assert shown.isprintable()
        shown.encode()
    assert escape.terminal(f"a\n\t{text}").startswith("a\n\t")
    assert escape.message(escape.message(text)) == escape.message(text)


@pytest.mark.parametrize("url", URLS)
def test_passwords_in_urls_are_masked(url):
    assert escape.masked(url) == URLS[url]
    assert "pw" not in escape.message(url) + escape.markdown(url) + escape.fenced(url) + escape.html(url)


@pytest.mark.parametrize("text", [*MARKUP, *CONTROLS, "a\nb", "\n\n# a", "a\n| b | c |", "    a"])
def test_markdown_shows_text_literally(text):
    render = MarkdownIt("commonmark").enable("table").enable("strikethrough").render
    shown = Content(render(f"* {escape.markdown(text)}\n"))
    assert shown.tags == ["ul", "li"]
    assert shown.text.strip() == escape.line(text).strip()
    row = f"| {escape.markdown(text)} | b |"
    shown = Content(render(f"| a | b |\n|---|---|\n{row}\n"))
    assert shown.tags.count("td") == 2 and shown.tags.count("tr") == 2
    assert not {"script", "a", "img", "code", "em", "strong"} & {*shown.tags}


class Content(html.parser.HTMLParser):
    """Collect a page's tags and text."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("text", ["a", "```", "````\nb\n````", "a\n```\n# b", "`" * 9, *CONTROLS])
def test_text_cannot_end_a_code_block(text):
    block = escape.fenced(text, "text")
    first, *inside, last = block.split("\n")
    marks = first.removesuffix("text")
    assert last == marks and {*marks} == {"`"}
    assert not any(marks in line for line in inside)
    assert "\n".join(inside) == escape.message(text)


@pytest.mark.parametrize("text", [*MARKUP, '" onload="a', "'", "a\nb"])
def test_text_cannot_add_html_tags_or_attributes(text):
    shown = Content(f'<p title="{escape.html(text)}">{escape.html(text)}</p>')
    assert shown.tags == ["p"]
    assert shown.text == escape.line(text)
    assert not {"<", ">", '"', "'"} & {*escape.html(text)}


@pytest.mark.parametrize("text", ["$^$", "$", "$$", r"\$x$", "a$b$c", "$\\frac$", "_a", "\x1b[1m"])
def test_pictures_show_text_literally(text):
    figure = Figure()
    panel = figure.subplots()
    panel.set_title(escape.picture(text))
    panel.plot([1, 2], label=escape.picture(text))
    legend = panel.legend()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(io.BytesIO())
    title: Any = panel.title
    shown, is_formula = title._preprocess_math(title.get_text())
    assert shown.strip() == escape.message(text) and not is_formula
    assert len(legend.get_texts()) == 1


def test_tell_escapes_control_characters_and_masks_passwords(capsys):
    tell("runs/\x1b[2Ja\nhttps://user:pw@host/b")
    assert capsys.readouterr().out == "runs/\\x1b[2Ja\nhttps://***@host/b\n"


@pytest.mark.parametrize("text", [*MARKUP, *CONTROLS, *URLS, "%{x}", "%{y:.3f}", "%%{x}", "%{customdata[0]}"])
def test_plotly_names_cannot_insert_values(text):
    assert "%{" not in escape.plotly(text)
    assert html.unescape(escape.plotly(text)) == html.unescape(escape.html(text))
