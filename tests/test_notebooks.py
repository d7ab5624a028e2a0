"""The notebooks in colab/: .py and .ipynb agree, and each notebook runs from first to last cell.

Each runs in its own directory with a kernel of this environment. A cell after the one tagged "parameters" makes it
small; otherwise it runs unchanged.
"""

import json
import re
import tomllib
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

from seqjax.study.report import figures, forest
from tests import support

COLAB = support.ROOT / "colab"
NAMES = sorted(path.stem for path in COLAB.glob("*.py"))
SMALL = "log.sample_tokens=0,log.tensorboard=False,data.cache_dir="


def read(name: str) -> nbformat.NotebookNode:
    return jupytext.read(COLAB / f"{name}.py")


def code(notebook: nbformat.NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", NAMES)
def test_py_and_ipynb_agree_without_outputs(name):
    """`make notebooks` writes the .ipynb from the .py."""
    stored = nbformat.read(COLAB / f"{name}.ipynb", as_version=4)
    nbformat.validate(stored)
    want = [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in read(name).cells]
    assert [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in stored.cells] == want
    for cell in stored.cells:
        assert not cell.get("outputs"), cell.source
        assert cell.get("execution_count") is None
    assert stored.metadata.kernelspec.name == "python3"


def test_every_notebook_has_py_and_ipynb():
    assert sorted(path.stem for path in COLAB.glob("*.ipynb")) == NAMES
    assert len(NAMES) == 4


ADDRESS = tomllib.loads((support.ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]


def test_the_repository_url_is_only_in_the_first_cell():
    """All notebooks have the same first cell."""
    first = {code(read(name))[0] for name in NAMES}
    assert len(first) == 1
    assert f'\nREPOSITORY = "{ADDRESS}"' in first.pop()
    for name in NAMES:
        assert (COLAB / f"{name}.py").read_text().count(ADDRESS) == 1


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_first_cell_installs_seqjax_if_missing(monkeypatch, tmp_path, has_gpu):
    monkeypatch.chdir(tmp_path)
    (cell, *_) = code(read(NAMES[0]))
    commands = []
    monkeypatch.setattr("subprocess.run", lambda command, check: commands.append(command[-1]))
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi" if has_gpu else None)
    exec(cell, {})
    assert commands == [], "it is installed here"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    exec(cell, {})
    extra = "[cuda12]" if has_gpu else ""
    assert commands == [f"seqjax{extra} @ git+{ADDRESS}"]
    wheel = tmp_path / "seqjax-0.1.0-py3-none-any.whl"
    wheel.touch()
    exec(cell, {})
    assert commands[1:] == [f"seqjax{extra} @ {wheel.as_uri()}"]


def run(name: str, parameters: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[nbformat.NotebookNode]:
    """Execute a notebook with changed parameters and return all cell outputs in order."""
    for key, value in support.environment().items():
        monkeypatch.setenv(key, value)
    # As for readers, except for fast compilation: no Triton interpreter and no other XLA flags.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(support.ROOT))
    for key, value in {"JUPYTER_PLATFORM_DIRS": "1", "IPYTHONDIR": directory / "ipython", "HOME": directory}.items():
        monkeypatch.setenv(key, str(value))
    notebook = read(name)
    (place,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    known = {line.partition(" = ")[0] for line in notebook.cells[place].source.splitlines()}
    assert {line.partition(" = ")[0] for line in parameters.splitlines()} <= known
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(parameters))
    resources = {"metadata": {"path": str(directory)}}
    NotebookClient(notebook, kernel_name="python3", timeout=500, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    warned = [output.text for output in outputs if "Warning" in output.get("text", "")]
    assert not warned, warned
    return outputs


def text_of(outputs: list[nbformat.NotebookNode]) -> str:
    texts = [output.get("text") or output.get("data", {}).get("text/markdown", "") for output in outputs]
    return "\n".join(texts)


def pictures(outputs: list[nbformat.NotebookNode]) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.slow
def test_quickstart(blocks_dir, tmp_path, monkeypatch):
    """Uses prepared blocks, because building the built-in corpus takes seconds."""
    settings = support.run_settings(blocks_dir, train__steps=2, eval__every=0, checkpoint__every=0)
    config = "top1_chunk:debug," + ",".join(f"{key}={value}" for key, value in settings.items())
    outputs = run("quickstart", f'CONFIG = "{config}"', tmp_path, monkeypatch)
    text = text_of(outputs)
    assert "Kernels: " in text, "the notebook says that this line names what runs"
    assert len(re.findall(r"^  github +\d", text, re.M)) == 1, "the table of the report, once"
    assert "\ndef " in text
    assert "  The function returns the number of elements." in text
    assert "Triton kernels need a GPU" in text
    assert pictures(outputs) == 1
    assert (tmp_path / "runs" / "first" / "report.md").is_file()


@pytest.mark.slow
def test_your_mixer(corpus_cache, tmp_path, monkeypatch):
    size = f"debug,train.steps=4,eval.every=1024,log.every=1,eval.tokens=128,{SMALL}{corpus_cache}"
    judged = f"debug,train.steps=10,optim.warmup_steps=1,eval.tokens=128,{SMALL}{corpus_cache}"
    outputs = run("your_mixer", f'SIZE = "{size}"\nJUDGED = "{judged}"', tmp_path, monkeypatch)
    assert "'causality'" in "".join(output.get("data", {}).get("text/plain", "") for output in outputs)
    text = text_of(outputs)
    assert "\nThe " in text
    assert "This is a smoke test" in text
    assert re.search(r"^Transformer\+\+, QK norm, conv .*; trains [0-9.]+ times as fast$", text, re.M)
    assert pictures(outputs) == 1
    made = {"gated_ema-debug", "transformer_pp-debug", "judge", "attention"}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == made
    assert (tmp_path / "runs" / "judge" / "judge.md").is_file()


def check_study(text: str) -> None:
    """Check the text about the study installed with seqjax."""
    runs = json.loads((support.ROOT / "seqjax" / "study" / "example" / "runs.json").read_text())["runs"]
    assert f"{len(runs)} runs of 6 models" in text
    assert "Verdict on Gated DeltaNet against Transformer++, QK norm, conv: costs." in text
    assert re.search(r"^Gated DeltaNet +in domain -0\.\d+ ± 0\.\d+, gap \+0\.2\d\d ± 0\.\d+: costs$", text, re.M)
    sentence = (
        "Models with an in-domain loss not above Transformer++, QK norm, conv: 1, of which 1 cost base capabilities."
    )
    assert sentence in text


def test_read_a_study_without_jupyter_or_pictures(tmp_path, monkeypatch, capsys):
    for module in (figures, forest):
        monkeypatch.setattr(module, "save", lambda figure, path: path.touch())
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in code(read("read_a_study")):
        exec(cell, names)
    check_study(capsys.readouterr().out)
    assert {path.name for path in (tmp_path / "runs" / "read_a_study").iterdir()} == {"losses.png", "gaps.png"}


@pytest.mark.slow
def test_read_a_study(tmp_path, monkeypatch):
    outputs = run("read_a_study", "", tmp_path, monkeypatch)
    text = text_of(outputs)
    check_study(text)
    assert re.search(r"^\| Gated DeltaNet .*\| \+0\.270 ± 0\.\d+ \| \+0\.260 \| costs \|", text, re.M)
    assert pictures(outputs) == 2
    assert {path.name for path in (tmp_path / "runs" / "read_a_study").glob("*.png")} == {"losses.png", "gaps.png"}


@pytest.mark.slow
def test_what_top1_selects(blocks_dir, tmp_path, monkeypatch):
    """Uses prepared blocks, with four chunks of eight tokens."""
    settings = support.run_settings(blocks_dir, train__steps=2, eval__every=0, checkpoint__every=0)
    settings |= {"model.mixer.chunk_size": 8}
    config = "top1_chunk:debug," + ",".join(f"{key}={value}" for key, value in settings.items())
    parameters = f'CONFIG = "{config}"\nDOMAIN = "github"\nN_BLOCKS = 3'
    outputs = run("what_top1_selects", parameters, tmp_path, monkeypatch)
    text = text_of(outputs)
    assert "2 layers of 2 heads; 32 tokens in 4 chunks of 8" in text
    assert "choose the chunk just before their own; at random it would be 61%." in text  # (1 + 1/2 + 1/3) / 3
    assert "Both rules agree for " in text
    assert "of the weight on past chunks, an even split 61%" in text
    for layer in range(2):
        assert f"layer {layer}, head " in text
    assert text.count("  query   ") == text.count("  chosen  ") == 2
    assert pictures(outputs) == 3
