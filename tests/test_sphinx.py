"""`make docs` covers every page and public name and builds without warnings."""

import re
import shutil
import sys

import pytest

import kernels_pallas
from seqjax import ops, presets
from tests import extras, support

DOCS = support.ROOT / "docs"


def conf():
    return presets.load_file(DOCS / "conf.py")


def test_every_page_is_in_the_table_of_contents():
    tables = "".join(re.findall(r"```{toctree}(.*?)```", (DOCS / "index.md").read_text(), re.S))
    entries = re.findall(r"^(?:.*<)?([\w/*]+)>?$", tables, re.M)
    pages = [path.relative_to(DOCS) for path in DOCS.rglob("*.md")]
    assert len(pages) > 20
    for page in pages:
        listed = any(page.match(f"{entry}.md") for entry in entries) or page.name == "index.md"
        assert listed, f"docs/{page}: add it to a table of contents in docs/index.md"


def test_public_names_are_in_the_reference():
    page = (DOCS / "api.md").read_text()
    for name in (
        "seqjax.pretrained.load",
        "seqjax.models.Model",
        "seqjax.config.settings",
        "seqjax.testing.check_mixer",
    ):
        assert f":: {name}\n" in page
    for name in ops.__all__:
        assert (f":: seqjax.ops.{name}\n" in page) != (getattr(ops, name) is getattr(kernels_pallas, name, None)), name


def test_docstrings_convert_to_restructuredtext():
    lines = ["Return x_ for *args | `a * b`.", "", "    one = 1", "", "Args:", "    x: An array.", ""]
    conf().as_restructured(None, "function", "f", None, None, lines)
    assert lines == [
        r"Return x\_ for \*args \| `a * b`.", "", "::", "", "    one = 1", "", "Args:", "    x: An array.", "",
    ]  # fmt: skip


def test_links_to_lab_become_repository_urls():
    """All pages are directly in docs, so such a link starts with ../lab."""
    assert all(path.parent == DOCS for path in DOCS.rglob("*.md"))
    source = ["[a](../lab/results/runs.csv), [b](../configs/mamba2.py)"]
    conf().link_lab(None, "results", source)
    assert source == [f"[a]({conf().REPOSITORY}/blob/main/lab/results/runs.csv), [b](../configs/mamba2.py)"]


def test_the_index_starts_with_readme():
    source = ["the end"]
    conf().front_page(None, "index", source)
    (page,) = source
    assert page.startswith("# seqjax\n") and page.endswith("the end") and "](docs/" not in page
    for place in ("quickstart.md", f"{conf().REPOSITORY}/blob/main/SECURITY.md", "pictures/trunks_110m_gaps.png"):
        assert f"]({place})" in page
    other = ["text"]
    conf().front_page(None, "data", other)
    assert other == ["text"]


@pytest.mark.slow
def test_docs_build_without_warnings_and_without_lab(tmp_path):
    extras.need("sphinx", "myst_parser", "furo")
    for path in support.ROOT.iterdir():
        if path.name not in ("docs", "lab"):
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(DOCS, tmp_path / "docs")
    args = ["--fail-on-warning", "--keep-going", "--quiet", "--builder=html", "docs", str(tmp_path / "out")]
    result = support.run([sys.executable, "-m", "sphinx", *args], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"{conf().REPOSITORY}/blob/main/lab/" in (tmp_path / "out" / "results.html").read_text()
    page = (tmp_path / "out" / "api.html").read_text()
    for name in kernels_pallas.__all__:
        assert f'id="kernels_pallas.{name}"' in page, name
    assert "https://" not in re.sub(r'href="[^"]*"', "", page), "it loads something from elsewhere"
