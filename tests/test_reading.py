"""A damaged file of any kind gives a one-line error with its name."""

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqjax.commands import generate
from seqjax.config import from_config_dict, presets, to_dict
from seqjax.data import document_index, manifests, stored_tokenizer
from seqjax.data.builtin import corpus as builtin
from seqjax.errors import UserError
from seqjax.evals import niah
from seqjax.evals.lm_eval import results
from seqjax.evals.recall import report as recall
from seqjax.reading import Float, check, read_json, read_json_lines
from seqjax.study import __main__ as study
from seqjax.study.gaps import classes
from seqjax.study.runs import collect
from seqjax.study.runs import files as of_study
from seqjax.training import checksums, eval_losses, lock, metrics, token_classes, workdir

Arrays = dict[str, np.ndarray]
CONFIG = {
    "version": workdir.VERSION,
    **to_dict(from_config_dict(presets.get_config("debug", name="transformer_pp", mixer={"name": "transformer_pp"}))),
}
RUN = {"device": "cpu", "devices": 1, "parameters": 10}
FILE = {"path": "train/c4-0.array_record", "blocks": 2, "bytes": 3, "sha256": "5"}
PREPARED = {
    "format": manifests.FORMAT,
    "tokenizer": {"name": "byte", "sha256": "1"},
    "block": 9,
    "splits": {"train": {"c4": {"blocks": 2, "files": [FILE]}}},
}
DOMAINS = {domain: {"file": "a", "tokens": 1, "documents": 1, "sha256": "a"} for domain in builtin.extract.DOMAINS}
OF_MODEL = {"step": 1, "max_length": 8, "tokenizer": "byte", "parameters_sha256": "6"}
RECALL = {"task": "mqar", "model": "a", "dim": 8, "steps": 1, "batch_size": 2, "rate": 0.1, "seconds": 1.5, "chance": 0}
RECALL |= {"asked": "5", "seed": 0}
RECALL |= {"device": "", "state": {"4 in 64": 8}, "tests": {"4 in 64": {"accuracy": 0.5, "whole": 0.5}}}
STUDY = {
    "study": {"title": "t", "references": ["a"], "domains": ["arxiv"], "against": ["c4"]},
    "missing": {},
    "runs": {"a 0": {"model": "a", "seed": 0, "rate": 1.0, "schedule": 1.0}},
}
TABLE = "".join(
    f"{line}\n"
    for line in (
        ",".join(of_study.COLUMNS),
        *(f"a 0,a,0,1,1,{s},{s}00,3.5,{d},3.25" for s in (1, 2) for d in ("arxiv", "c4")),
    )
)
TWO = np.arange(2)


def save(path: Path, content: Any) -> None:
    """Write a value in the format of the file name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".npz":
        np.savez_compressed(path, **content)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def analyse(directory: Path) -> None:
    """Read a study as the command does, without its slow tables and pictures."""
    if (directory / "metrics.npz").is_file():
        of_study._stored_metrics(directory)
    of_study.read(directory)
    classes.read(directory)


OF_STUDY: dict[str, Any] = {
    "runs.json": STUDY,
    "points.csv": TABLE,
    "blocks.npz": {"kept": TWO < 2}
    | {
        f"{name}/{key}": x
        for name in ("c4", "arxiv")
        for key, x in {"documents": TWO, "losses": np.full((2, 2), 3.25)}.items()
    },
    "classes.npz": {
        "runs": np.array(["a 0"]),
        "steps": np.array([2]),
        "repeat": np.array(["x", "y", "z"]),
        "c4/blocks": TWO,
        "c4/repeat/tokens": np.ones((2, 3), int),
        "c4/repeat/losses": np.ones((1, 2, 3)),
    },
    "metrics.npz": {"run": np.array(["a 0", "a 0"]), "end": TWO, "step": TWO, "train/loss": np.array([1.0, np.nan])},
}
# The files of a workdir.
OF_RUN: dict[str, Any] = {
    "run.json": RUN,
    "config.json": CONFIG,
    "metrics.jsonl": [{"step": 1, "train/loss": float("nan"), "mfu": None}, {"step": 2, "tokens": 20}],
    "niah.json": {"lengths": {"4096": {"accuracy": 0.5, "samples": 2}}},
    "harness/copy.json": {results.KEY: {"task": "copy", **OF_MODEL}, "results": {"copy": {"acc,none": 0.5}}},
}
LOSSES: dict[str, Any] = {
    "blocks.npz": {"c4/documents": TWO, "c4/index": TWO, "c4/n_bytes": TWO},
    "00000001.npz": {"c4": np.ones(2, np.float32)},
}
CLASSES = {"step": np.array(2), "repeat": np.array(["x", "y", "z"]), "c4/documents": TWO, "c4/blocks": TWO}
CLASSES |= {"c4/repeat/losses": np.ones((2, 3)), "c4/repeat/tokens": np.ones((2, 3), int)}
TOKENIZER = {
    "name": np.array("byte"),
    "hash": np.array("7"),
    "special": TWO,
    "n_bytes": TWO,
    "adds_space": np.array(True),
}
CHECKPOINT = {
    "_CHECKPOINT_METADATA": b'{"item_handlers": {"params": ""}, "custom_metadata": {"checksums": 1}}',
    "params/x": b"x",
    "checksums.json": {"crc32": {"params/x": [1, 2363233923]}},
}

# name -> damaged file, all files, reader
FILES: dict[str, tuple[str, dict[str, Any], Callable[[Path], Any]]] = {
    "config of a run": ("config.json", OF_RUN, workdir.load_config),
    "run.json": ("run.json", OF_RUN, lambda directory: read_json(directory / "run.json", collect.METADATA)),
    "metrics.jsonl": ("metrics.jsonl", OF_RUN, metrics.read),
    "niah.json": ("niah.json", OF_RUN, lambda directory: niah.saved_results(directory / "niah.json", {}, niah.FORM)),
    "harness/copy.json": ("harness/copy.json", OF_RUN, lambda directory: results.read(directory / "harness")),
    **{name: (name, OF_STUDY, analyse) for name in OF_STUDY},
    **{
        f"losses {name}": (f"eval_losses/{name}", {f"eval_losses/{n}": a for n, a in LOSSES.items()}, eval_losses.read)
        for name in LOSSES
    },
    "sums": ("eval_losses/classes.npz", {"eval_losses/classes.npz": CLASSES}, token_classes.read_classes),
    "manifest": ("manifest.json", {"manifest.json": PREPARED, FILE["path"]: b"abc"}, manifests.read_manifest),
    "built-in": (
        "manifest.json",
        {
            "manifest.json": {
                "hash": "8",
                "tokenizer": "a",
                "version": 1,
                "splits": {"train": DOMAINS, "validation": DOMAINS},
            }
        },
        builtin.read_manifest,
    ),
    "documents": (
        "documents.npz",
        {"documents.npz": {"train/c4": TWO}},
        lambda directory: document_index.read(directory / "documents.npz"),
    ),
    "tokenizer": (
        "tokenizer.npz",
        {"tokenizer.npz": TOKENIZER},
        lambda directory: stored_tokenizer.read(directory / "tokenizer.npz", why=""),
    ),
    "checksums": ("checksums.json", CHECKPOINT, lambda directory: checksums.check(directory, ["params"])),
    "recall": ("runs.jsonl", {"runs.jsonl": [RECALL]}, recall.results),
}
JSON = [name for name, (file, *_) in FILES.items() if Path(file).suffix == ".json"]
NPZ = [name for name, (file, *_) in FILES.items() if Path(file).suffix == ".npz"]
NOT_JSON = {
    "random": np.random.default_rng(0).bytes(300),
    "not UTF-8": b'{"a": "\xff"}',
    "a list": b"[]",
    "a number": b"3",
    "null": b"null",
    "nested": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested less": b'{"a":' + b"[" * 400 + b"]" * 400 + b"}",
    "half a surrogate pair": rb'{"a": "\ud800"}',
    "a long number": b'{"a": ' + b"9" * 5000 + b"}",
}


def require_named_error(name: str, tmp_path: Path, content: Any) -> None:
    """Check that the reader accepts the files and refuses `content` by file name."""
    file, files, reader = FILES[name]
    for name_of_file, content_before in files.items():
        save(tmp_path / name_of_file, content_before)
    reader(tmp_path)
    save(tmp_path / file, content)
    with pytest.raises((UserError, checksums.DamagedError), match=Path(file).name) as caught:
        reader(tmp_path)
    assert "\n" not in str(caught.value)


def content_of(name: str) -> Any:
    """Return a copy of a file's content."""
    file, files, _ = FILES[name]
    content = files[file]
    return dict(content) if file.endswith(".npz") else json.loads(json.dumps(content))


@pytest.mark.parametrize("damage", [*NOT_JSON, "empty", "half"])
@pytest.mark.parametrize("name", JSON)
def test_damaged_json_names_the_file(tmp_path: Path, name: str, damage: str):
    valid = json.dumps(content_of(name)).encode()
    require_named_error(name, tmp_path, ({"empty": b"", "half": valid[: len(valid) // 2]} | NOT_JSON)[damage])


@pytest.mark.parametrize("damage", NOT_JSON)
@pytest.mark.parametrize("name", ["metrics.jsonl", "recall"])
def test_damaged_json_line_names_the_file(tmp_path: Path, name: str, damage: str):
    valid = json.dumps(content_of(name)[0]).encode()
    require_named_error(name, tmp_path, valid + b"\n" + NOT_JSON[damage] + b"\n" + valid + b"\n")


# Key paths by file.
KEYS = {
    "config of a run": ("model.dim", "version"),
    "run.json": ("device",),
    "niah.json": ("lengths.4096", "lengths.4096.accuracy"),
    "harness/copy.json": (f"{results.KEY}.task", f"{results.KEY}.step"),
    "runs.json": ("study", "study.domains", "missing", "runs.a 0", "runs.a 0.model", "runs.a 0.rate"),
    "manifest": ("format", "block", "tokenizer.sha256", "splits", "splits.train.c4.files", "splits.train.c4.blocks"),
    "built-in": ("hash", "splits.train.prose", "splits.validation.prose.tokens"),
    "checksums": ("crc32",),
}
# Keys that may be missing.
OPTIONAL = ("model.dim", "device", "lengths.4096", f"{results.KEY}.step")


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in KEYS.items() for key in keys])
@pytest.mark.parametrize("value", ["missing", None, [1.5], True], ids=str)
def test_wrong_json_key_names_the_file(tmp_path: Path, name: str, key: str, value: Any):
    content = content_of(name)
    *path, last = key.split(".")
    inner = content
    for part in path:
        inner = inner[part]
    inner[last] = value
    if value == "missing":
        del inner[last]
        if key in OPTIONAL:
            return
    require_named_error(name, tmp_path, content)


def packed(**members: bytes) -> bytes:
    """Return a zip file with these members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        for name, content in members.items():
            out.writestr(name, content)
    return file.getvalue()


def saved(arrays: Arrays) -> bytes:
    """Return the bytes of an npz file."""
    file = io.BytesIO()
    np.savez(file, allow_pickle=True, **arrays)
    return file.getvalue()


def changed(arrays: Arrays, name: str, value: np.ndarray | None) -> bytes:
    """Return the bytes of an npz file with array `name` replaced, or removed if None."""
    return saved({key: x for key, x in (arrays | {name: value}).items() if x is not None})


def npy(x: np.ndarray) -> bytes:
    """Return the bytes of an npy file."""
    file = io.BytesIO()
    np.save(file, x)
    return file.getvalue()


NPZ_DAMAGE: dict[str, Callable[[Arrays], bytes]] = {
    "empty": lambda arrays: b"",
    "half": lambda arrays: saved(arrays)[: len(saved(arrays)) // 2],
    "random": lambda arrays: NOT_JSON["random"],
    "one array": lambda arrays: npy(TWO),
    "a changed byte": lambda arrays: saved(arrays).replace(b"\x93NUMPY", b"\x92NUMPY"),
    "a changed checksum": lambda arrays: saved({**arrays, "a": TWO + 77}).replace(b"\x4d\0\0\0", b"\x4c\0\0\0"),
    "pickled": lambda arrays: changed(arrays, next(reversed(arrays)), np.array([{}, None], object)),
    "colliding": lambda arrays: packed(**{"a.npy": npy(TWO), "a": npy(TWO)}),
    "no array": lambda arrays: packed(**{"a.npy": b"text"}),
    "another type": lambda arrays: changed(arrays, next(reversed(arrays)), np.array([b"a", b"b"])),
    "another shape": lambda arrays: changed(arrays, next(reversed(arrays)), np.ones((5, 4, 3, 2), np.float32)),
}


@pytest.mark.parametrize("damage", NPZ_DAMAGE)
@pytest.mark.parametrize("name", NPZ)
def test_damaged_npz_names_the_file(tmp_path: Path, name: str, damage: str):
    require_named_error(name, tmp_path, NPZ_DAMAGE[damage](content_of(name)))


@pytest.mark.parametrize(
    ("name", "array"),
    [
        *((name, array) for name in ("tokenizer",) for array in TOKENIZER),
        ("metrics.npz", "run"),
        *(("classes.npz", array) for array in ("runs", "steps", "c4/repeat/losses")),
        *(("blocks.npz", array) for array in ("kept", "arxiv/losses", "arxiv/documents")),
        *(("sums", array) for array in ("step", "c4/blocks", "c4/repeat/tokens")),
    ],
)
def test_missing_array_names_the_file(tmp_path: Path, name: str, array: str):
    require_named_error(name, tmp_path, changed(content_of(name), array, None))


ROW = TABLE.splitlines()[1]
TABLES = {
    "empty": b"",
    "half": TABLE[: len(TABLE) // 2].encode(),
    "a row less": TABLE[: TABLE.rindex("a 0,")].encode(),
    "a digit less": TABLE[:-2].encode(),
    "random": NOT_JSON["random"],
    "not UTF-8": TABLE.replace("arxiv", "\xe4").encode("latin-1"),
    "no header": TABLE.partition("\n")[2].encode(),
    "another header": TABLE.replace("train_loss", "loss_of_training").encode(),
    "a short row": TABLE.replace(ROW, ROW.rpartition(",")[0]).encode(),
    "a long row": TABLE.replace(ROW, f"{ROW},1").encode(),
    "a word": TABLE.replace("3.25", "three").encode(),
    "a fraction": TABLE.replace(",100,", ",100.5,").encode(),
    "a long number": TABLE.replace(",100,", f",{10**30},").encode(),
    "NaN": TABLE.replace("3.25", "nan").encode(),
    "an open quote": TABLE.replace("arxiv", '"arxiv').encode(),
    "another run": TABLE.replace("a 0,", "b 0,").encode(),
}


@pytest.mark.parametrize("damage", TABLES)
def test_damaged_csv_names_the_file(tmp_path: Path, damage: str):
    require_named_error("points.csv", tmp_path, TABLES[damage])


@pytest.mark.parametrize("name", ["runs.json", "points.csv", "blocks.npz", "classes.npz"])
def test_study_command_names_the_damaged_file(tmp_path: Path, name: str):
    for each, content in OF_STUDY.items():
        save(tmp_path / each, content)
    (tmp_path / name).write_bytes(NOT_JSON["random"])
    with pytest.raises(UserError, match=name):
        study.main([f"--analyse={tmp_path}"])


@pytest.mark.parametrize("name", ["config of a run", "points.csv", "tokenizer", "recall"])
def test_directory_in_place_of_a_file_is_refused(tmp_path: Path, name: str):
    file, files, reader = FILES[name]
    for each, content in files.items():
        save(tmp_path / each, content)
    (tmp_path / file).unlink()
    (tmp_path / file).mkdir()
    with pytest.raises(UserError, match=file):
        reader(tmp_path)


def test_incomplete_last_line_is_dropped(tmp_path: Path):
    save(tmp_path / "metrics.jsonl", OF_RUN["metrics.jsonl"])
    valid = (tmp_path / "metrics.jsonl").read_bytes()
    for rest in (b'{"step": 3, "trai', b"\0\0\0", b"\xff"):
        (tmp_path / "metrics.jsonl").write_bytes(valid + rest)
        assert [row["step"] for row in metrics.read(tmp_path)] == [1, 2]
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 3 .*JSON"):
        read_json_lines(tmp_path / "metrics.jsonl", dict)


@pytest.mark.parametrize("damage", [*NOT_JSON, "another type"])
def test_damaged_lock_has_no_holder(tmp_path: Path, damage: str):
    """A process killed during the write leaves one too; the next run uses its age."""
    holder = lock.Holder("host", "space", 1, "started", "since", "token")
    path = tmp_path / lock.FILE
    path.write_bytes(lock._content(holder))
    assert lock._read(str(path)) == holder
    path.write_bytes(NOT_JSON.get(damage, lock._content(holder._replace(pid="1"))))  # pyright: ignore[reportArgumentType]
    assert lock._read(str(path)) is None


@pytest.mark.parametrize(
    "line", [b"[]", b"{}", b'{"prompt": 3}', NOT_JSON["nested"], NOT_JSON["half a surrogate pair"]]
)
def test_damaged_prompt_line_is_named(tmp_path: Path, line: bytes):
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "a"}\n' + line)
    with pytest.raises(UserError, match=r"p\.jsonl, line 2"):
        generate.read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (int, [0, -3], [1.0, True, "1", None, 2**63]),
        (float, [1, 0.5], [float("nan"), float("inf"), False, "1"]),
        (Float, [1, float("nan")], ["nan", None]),
        ((float, None), [1, None], [{}, "x"]),
        (bool, [True, False], [1, 0, "true", None]),
        (("a", "b"), ["a", "b"], ["c", 1]),
        ((1, 2), [1, 2], [3, True]),
        ([str], [[], ["a"]], [["a", 1], {}, "a"]),
        ({"a": int, "b?": str}, [{"a": 1}, {"a": 1, "b": "", "c": []}], [{}, {"b": ""}, {"a": 1, "b": None}]),
        ({"a": int, str: str}, [{"a": 1, "c": ""}], [{"a": 1, "c": 2}, {"a": ""}]),
        ({int: str}, [{}, {"1": ""}], [{"x": ""}, {"1": 1}]),
    ],
    ids=str,
)
def test_check_accepts_and_refuses_values(form: Any, good: list[Any], bad: list[Any]):
    for value in good:
        check(value, form, "f")
    for value in bad:
        with pytest.raises(UserError, match=r"^f: "):
            check(value, form, "f")


def test_error_names_the_key_path(tmp_path: Path):
    save(tmp_path / "a.json", {"runs": [{"seed": 1}, {"seed": "x"}]})
    with pytest.raises(UserError, match=rf'^{tmp_path}/a\.json: runs\.1\.seed .*"x".*integer; FIX\.$'):
        read_json(tmp_path / "a.json", {"runs": [{"seed": int}]}, fix="FIX")
