"""A study's results: data, tables, pictures, and comparisons of two models."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from seqjax.errors import UserError
from seqjax.study import __main__ as study
from seqjax.study import gaps
from seqjax.study.report import leaderboard, results, words
from seqjax.study.runs import files
from seqjax.study.runs.record import UNITS
from seqjax.study.runs.studies import load_study
from seqjax.training import eval_losses, metrics
from tests import support
from tests.study.synthetic import DOMAINS, write_run, write_study, write_trunk

pytestmark = pytest.mark.usefixtures("undrawn_pictures")
ENDS = (0.5, 0.65, 0.8, 1.0)
TABLES = ("leaderboard.md", "leaderboard.csv")


def outside(domain, loss):
    """Return the reference's OOD loss at an in-domain loss."""
    return 1.5 + 0.8 * (loss - 2) + 0.4 * (loss - 2) ** 2 + 0.2 * (domain == "github")


def write_models(directory, models, *, seeds=3, rates=(1.0,), manifest="m"):
    """Write WSD runs of `slow` and `models`, and return the study's entries.

    `models` maps name -> (in-domain difference, gap), in nats."""
    rng, entries = np.random.default_rng(0), {}
    for model, (worse, gap) in {"slow": (0.0, 0.0), **models}.items():
        for seed, rate in [(s, 1.0) for s in range(seeds)] + [(0, rate) for rate in rates if rate != 1]:
            seed_gap, in_domain_shift = gap + 0.004 * rng.normal(), worse + 0.01 * abs(np.log2(rate))
            label = f"{model} x{rate:g} {seed}"
            losses = {share: 2.0 + 0.6 * share**-0.5 + in_domain_shift for share in ENDS}
            write_trunk(
                directory / label,
                losses,
                lambda domain, x, seed_gap=seed_gap: outside(domain, x) + seed_gap,
                noise=100 * seed + len(entries),
                manifest=manifest,
            )
            entries[label] = {"workdir": str(directory / label), "model": model, "seed": seed, "rate": rate}
    return entries


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return entries of a reference and two models: three rates, three seeds."""
    directory = tmp_path_factory.mktemp("models")
    return write_models(directory, {"dear": (0.05, 0.3), "gain": (-0.04, -0.2)}, rates=(0.5, 1.0, 2.0))


@pytest.fixture(scope="module")
def data(models, tmp_path_factory):
    """Return the data directory for `models`, without tables and pictures."""
    directory = tmp_path_factory.mktemp("data")
    results._write_data(load_study(write_study(directory / "study.py", models)), directory / "out", {})
    return directory / "out"


@pytest.fixture
def out(data, tmp_path):
    """Return the results directory for `models`."""
    shutil.copytree(data, tmp_path / "out")
    results.analyse(tmp_path / "out", quiet=True)
    return tmp_path / "out"


@pytest.fixture
def runs(tmp_path):
    """Return two runs with a linear schedule."""
    fast = write_run(tmp_path / "fast", [5.0, 4.0, 3.0, 2.0], offset={"arxiv": 0.25, "github": 0.5})
    slow = write_run(tmp_path / "slow", [5.5, 4.5, 3.5, 2.5])
    return {"fast": fast, "slow": slow}


# -------------------------------------------------------------------------------------------------------- from runs
def test_synthetic_gaps_are_recovered(out):
    rows = {row.model: row for row in gaps.compare(files.read(out), "slow")}
    for model, gap in {"dear": 0.3, "gain": -0.2}.items():
        assert abs(rows[model].gap.value - gap) < rows[model].gap.half < 0.1
        assert rows[model].gap.text() in (out / "leaderboard.md").read_text()
    assert [rows[model].verdict.word for model in ("dear", "gain")] == ["costs", "gains"]
    lines = leaderboard.read(out / "leaderboard.csv")
    assert {line["model"]: line["verdict"] for line in lines} == {"dear": "costs", "gain": "gains"}
    names = {path.name for path in out.iterdir()}
    assert {f"{name}.png" for name in ("gaps", "losses", "cost", "rates")} <= names and "gaps.md" not in names


def test_study_without_gaps_has_equal_tokens(runs, tmp_path):
    study.main([f"--study={write_study(tmp_path / 'study.py', runs)}", f"--out={tmp_path / 'out'}"])
    text = (tmp_path / "out" / "leaderboard.md").read_text()
    assert "| fast | - | 1 | x1 | -0.125 | -0.500 |" in text and "one end per run" in text
    points = (tmp_path / "out" / "points.csv").read_text().splitlines()
    assert len(points) == 1 + 2 * 4 * (4 + 2)
    assert points[1] == "fast,fast,0,1,1,0,0,4.800000,commoncrawl,5.000000"
    assert not (tmp_path / "out" / "rates.png").exists(), "no model ran at several rates"


def test_shorter_schedules_become_ends(tmp_path):
    """The reference's ends lie on a line with slope 1; the model's end is 0.2 above."""
    entries = {}
    for seed in range(2):
        for losses, share in (([4.0, 3.0, 2.5, 2.0], 1.0), ([4.0, 3.0, 2.25], 0.8), ([4.0, 2.5], 0.6)):
            label = f"slow {share} {seed}"
            run = write_run(tmp_path / label, losses, noise=seed)
            entries[label] = {"workdir": str(run), "model": "slow", "seed": seed, "schedule": share}
        run = write_run(tmp_path / f"x {seed}", [4.0, 3.0, 2.5, 2.1], offset=0.2, noise=seed)
        entries[f"x {seed}"] = {"workdir": str(run), "model": "x", "seed": seed}
    study.main([f"--study={write_study(tmp_path / 'study.py', entries)}", f"--out={tmp_path / 'out'}"])
    study_records = files.read(tmp_path / "out")
    (row,) = gaps.compare(study_records, "slow")
    assert row.gap.value == pytest.approx(0.2, abs=1e-3) and row.loss == pytest.approx(2.1, abs=1e-3)
    assert [len(run.ends) for run in study_records.of_model("slow")] == [3, 3]


def test_partial_keeps_results_of_absent_runs(runs, tmp_path):
    path, out = write_study(tmp_path / "study.py", runs), tmp_path / "out"
    study.main([f"--study={path}", f"--out={out}"])
    contents = {name: (out / name).read_bytes() for name in (*TABLES, "points.csv")}
    arrays_by_file = {name: dict(np.load(out / name)) for name in ("blocks.npz", "metrics.npz")}
    runs["slow"].rename(tmp_path / "elsewhere")
    study.main([f"--study={path}", f"--out={out}", "--partial"])
    assert {name: (out / name).read_bytes() for name in contents} == contents
    for name, arrays in arrays_by_file.items():
        stored = np.load(out / name)
        assert list(arrays) == stored.files
        for key, array in arrays.items():
            np.testing.assert_array_equal(stored[key], array)
    # A run that was trained again replaces its old results.
    write_run(runs["slow"], [5.5, 4.5, 3.5])
    study.main([f"--study={path}", f"--out={out}", "--partial"])
    assert (out / "points.csv").read_bytes() != contents["points.csv"]


@pytest.mark.parametrize("name", ["points.csv", "runs.json", "blocks.npz", "metrics.npz", "classes.npz"])
def test_damaged_earlier_result_is_replaced(name, runs, tmp_path):
    """If an absent run needs the file, the error's remedy works."""
    path, out = write_study(tmp_path / "study.py", runs), tmp_path / "out"
    command = [f"--study={path}", f"--out={out}", "--partial"]
    study.main(command)
    contents = {file: (out / file).read_bytes() for file in (*TABLES, "points.csv")}
    (out / name).write_bytes(b"damaged")
    study.main(command)
    assert {file: (out / file).read_bytes() for file in contents} == contents
    runs["fast"].rename(tmp_path / "elsewhere")
    (out / name).write_bytes(b"damaged")
    with pytest.raises(UserError, match=name) as caught:
        study.main(command)
    assert "it away" in str(caught.value)
    (out / name).rename(tmp_path / name)
    study.main(command)
    assert (
        "fast"
        in json.loads((out / "runs.json").read_text())["missing" if name in ("points.csv", "runs.json") else "runs"]
    )


def test_stored_results_include_all_schedules(tmp_path):
    entries = {}
    for share in (0.5, 1.0):
        run = write_run(tmp_path / f"slow {share}", [4.0, 3.0 - share])
        entries[f"slow {share}"] = {"workdir": str(run), "model": "slow", "schedule": share}
    path, out = write_study(tmp_path / "study.py", entries), tmp_path / "out"
    study.main([f"--study={path}", f"--out={out}"])
    original = (out / "points.csv").read_bytes()
    shutil.move(tmp_path / "slow 0.5", tmp_path / "elsewhere")
    study.main([f"--study={path}", f"--out={out}", "--partial"])
    assert (out / "points.csv").read_bytes() == original


def test_stored_results_with_other_settings_are_refused(runs, tmp_path):
    out = tmp_path / "out"
    study.main([f"--study={write_study(tmp_path / 'study.py', runs)}", f"--out={out}"])
    recorded = json.loads((out / "runs.json").read_text())
    recorded["runs"]["fast"]["config"] = {"model": {"dim": 1}}
    (out / "runs.json").write_text(json.dumps(recorded))
    original = (out / "points.csv").read_bytes()
    fast = {"workdir": str(tmp_path / "not_here"), "config": "transformer_pp:debug"}
    path = write_study(tmp_path / "study.py", runs | {"fast": fast})
    with pytest.raises(UserError, match=r"'fast' .*model\.dim: 1 -> "):
        study.main([f"--study={path}", f"--out={out}", "--partial"])
    assert (out / "points.csv").read_bytes() == original
    # Settings that the record lacks are not compared, also in lists.
    hybrid = "transformer_pp:debug,model.mixer=({'name':'kda','heads':2},{'name':'transformer_pp'})"
    path = write_study(tmp_path / "study.py", runs | {"fast": fast | {"config": hybrid}})
    mixer = [{"name": "kda", "heads": 2}, {"name": "transformer_pp"}]
    recorded["runs"]["fast"]["config"] = {"model": {"mixer": mixer}}
    (out / "runs.json").write_text(json.dumps(recorded))
    study.main([f"--study={path}", f"--out={out}", "--partial"])
    assert (out / "points.csv").read_bytes() == original
    mixer[0]["heads"] = 4
    (out / "runs.json").write_text(json.dumps(recorded))
    with pytest.raises(UserError, match=r"model\.mixer\[0\]\.heads: 4 -> 2"):
        study.main([f"--study={path}", f"--out={out}", "--partial"])
    path = write_study(tmp_path / "study.py", runs | {"fast": fast})
    # Backends are not compared.
    recorded["runs"]["fast"]["config"] = {"model": {"mixer": {"implementation": "triton"}}}
    (out / "runs.json").write_text(json.dumps(recorded))
    study.main([f"--study={path}", f"--out={out}", "--partial"])
    assert (out / "points.csv").read_bytes() == original


def test_missing_runs_are_listed_and_missing_reference_refused(models, tmp_path):
    entries = {label: dict(entry) for label, entry in models.items()}
    entries["dear x1 2"]["workdir"] = str(tmp_path / "absent")
    path = write_study(tmp_path / "study.py", entries)
    study.main([f"--study={path}", f"--out={tmp_path / 'out'}", "--partial"])
    assert "**Missing:** dear x1 2 (not begun)." in (tmp_path / "out" / "leaderboard.md").read_text()
    assert {line["model"]: line["seeds"] for line in leaderboard.read(tmp_path / "out" / "leaderboard.csv")}[
        "dear"
    ] == 2
    for label, entry in entries.items():
        entry["workdir"] = str(tmp_path / "absent" / label) if label.startswith("slow") else entry["workdir"]
    path = write_study(tmp_path / "study.py", entries)
    with pytest.raises(UserError, match=r"No reference .*slow x1 0: "):
        study.main([f"--study={path}", f"--out={tmp_path / 'other'}", "--partial"])


def test_metrics_store_trunk_and_cooldown_rows(out):
    with np.load(out / "metrics.npz") as file:
        is_run = file["run"] == "slow x1 0"
        ends, steps = file["end"][is_run], file["step"][is_run]
    assert set(ends) == {0, *(round(1000 * share) for share in ENDS)}
    assert (steps[ends > 0] == ends[ends > 0]).all()
    assert [point.step for point in files.read(out).runs[0].points] == [500, 650, 800, 1000], "only decayed ends"


def test_metrics_store_rows_of_all_runs(runs, tmp_path):
    with (runs["fast"] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "device_peak_gib": None}) + "\n")
    study.main([f"--study={write_study(tmp_path / 'study.py', runs)}", f"--out={tmp_path / 'out'}"])
    with np.load(tmp_path / "out" / "metrics.npz") as file:
        arrays = dict(file)
    assert np.isnan(arrays.pop("device_peak_gib")).all() and not arrays.pop("end").any()
    labels = arrays.pop("run")
    for label, workdir in runs.items():
        columns = {field: values[labels == label] for field, values in arrays.items()}
        stored_rows = [
            {field: column[i] for field, column in columns.items() if not np.isnan(column[i])}
            for i in range(np.sum(labels == label))
        ]
        rows = [{field: x for field, x in row.items() if x is not None} for row in metrics.read(workdir)]
        assert stored_rows == rows


def test_runs_in_a_store_give_identical_results(models, memory, tmp_path):
    stored = {k: v | {"workdir": support.put(Path(v["workdir"]), f"{memory}/{k}")} for k, v in models.items()}
    for name, entries in (("here", models), ("there", stored)):
        path = write_study(tmp_path / f"{name}.py", entries)
        study.main([f"--study={path}", f"--out={tmp_path / name}"])
    for name in ("points.csv", "blocks.npz", "leaderboard.md"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes(), name


def test_study_in_bits_per_byte(tmp_path):
    entries = {}
    for model, tokenizer, gap in (("slow", "byte", 0.0), ("x", "mixtral", 0.2)):
        for seed in range(2):
            for share, loss in ((1.0, 2.0), (0.7, 2.2)):
                label = f"{model} {seed} {share}"
                run = write_run(tmp_path / label, [4.0, loss], offset=gap, noise=seed, tokenizer=tokenizer)
                entries[label] = {"workdir": str(run), "model": model, "seed": seed, "schedule": share}
    with pytest.raises(UserError, match=r"tokenizers.*bits_per_byte"):
        study.main([f"--study={write_study(tmp_path / 'study.py', entries)}", f"--out={tmp_path / 'out'}"])
    path = write_study(tmp_path / "study.py", entries, unit="bits_per_byte")
    study.main([f"--study={path}", f"--out={tmp_path / 'out'}"])
    study_records = files.read(tmp_path / "out")
    (row,) = gaps.compare(study_records, "slow")
    assert study_records.unit == UNITS["bits_per_byte"] and row.gap.value == pytest.approx(0.05, abs=1e-4)
    assert "Losses are in bits per byte" in (tmp_path / "out" / "leaderboard.md").read_text()


def test_lost_block_losses_are_reported_and_a_lost_row_refused(tmp_path, capsys):
    """A block file is written after its row, so a file without a row is an error."""
    runs = {name: write_run(tmp_path / name, [4.0, 3.0, 2.0]) for name in ("slow", "x")}
    arguments = [f"--study={write_study(tmp_path / 'study.py', runs)}", f"--out={tmp_path / 'out'}"]
    study.main(arguments)
    assert "No block" not in capsys.readouterr().out
    (runs["x"] / eval_losses.DIRECTORY / "00000001.npz").unlink()
    study.main(arguments)
    assert "in x for 00000001.npz" in capsys.readouterr().out
    rows = (runs["slow"] / "metrics.jsonl").read_text()
    for remaining in (rows[:-9], "".join(rows.splitlines(keepends=True)[:-1])):
        (runs["slow"] / "metrics.jsonl").write_text(remaining)
        with pytest.raises(UserError, match=r"slow/metrics\.jsonl .*step 2\b"):
            study.main(arguments)


def test_incompatible_runs_are_refused(tmp_path):
    entries = {"slow": write_run(tmp_path / "slow", [4.0, 2.0]), "x": write_run(tmp_path / "x", [4.0, 2.0])}

    def compared(entries, **more):
        path = write_study(tmp_path / "study.py", entries, **more)
        study.main([f"--study={path}", f"--out={tmp_path / 'out'}"])

    with pytest.raises(UserError, match=r"slow .*book.*commoncrawl, c4, arxiv"):
        compared(entries, domains=("arxiv", "book"))
    other = write_run(tmp_path / "other", [4.0, 2.0], manifest="other")
    with pytest.raises(UserError, match=r"slow, x: manifest m; y: manifest other"):
        compared(entries | {"y": other})
    blocks_path = entries["x"] / eval_losses.DIRECTORY / "blocks.npz"
    with np.load(blocks_path) as arrays:
        changed = {key: value + key.endswith("index") for key, value in arrays.items()}
    np.savez(blocks_path, allow_pickle=False, **changed)
    with pytest.raises(UserError, match=r"x .*blocks than slow.*eval\.seed"):
        compared(entries)
    assert not (tmp_path / "out").exists()


def test_ends_without_evaluation_or_config_are_refused(tmp_path):
    entries = write_models(tmp_path, {"dear": (0.05, 0.3)}, seeds=1)
    shutil.rmtree(tmp_path / "dear x1 0" / "ends" / "800")
    (tmp_path / "dear x1 0" / "ends" / "1000" / "metrics.jsonl").write_text("")
    path, out = write_study(tmp_path / "study.py", entries), tmp_path / "out"
    with pytest.raises(UserError, match=r"dear x1 0 .*step 800, 1000"):
        study.main([f"--study={path}", f"--out={out}"])
    study.main([f"--study={path}", f"--out={out}", "--partial"])
    missing_line = "**Missing:** dear x1 0 (no evaluation yet at the ends after step 800, 1000)."
    assert missing_line in (out / "leaderboard.md").read_text()
    (tmp_path / "dear x1 0" / "config.json").unlink()
    with pytest.raises(UserError, match=r"dear x1 0/config\.json.* ends"):
        study.main([f"--study={path}", f"--out={out}"])


# ------------------------------------------------------------------------------------------------------ from the data
def test_analyse_needs_no_workdirs(out, tmp_path, capsys):
    contents = {name: (out / name).read_bytes() for name in TABLES}
    for name in contents:
        (out / name).unlink()
    (out / "gaps.md").write_text("of an earlier version")
    assert results.analyse(out, quiet=True).encode() == contents["leaderboard.md"]
    assert {name: (out / name).read_bytes() for name in contents} == contents
    assert not (out / "gaps.md").exists() and not (out / "leaderboard.tex").exists()
    study.main([f"--analyse={out}", "--latex"])
    assert (out / "leaderboard.tex").read_text().count(r"\midrule") == 2
    assert contents["leaderboard.md"].decode() in capsys.readouterr().out
    with pytest.raises(UserError, match=r"^--analyse=DIR"):
        study.main([f"--analyse={out}", "--study=x"])
    with pytest.raises(UserError, match=r"study.* runs\.json"):
        study.main([f"--analyse={tmp_path}"])


def test_missing_class_sums_are_reported(out, capsys):
    for has_classes in (False, True):
        about = json.loads((out / "runs.json").read_text())
        about["runs"]["slow x1 0"]["config"]["eval"] = {"classes": has_classes}
        (out / "runs.json").write_text(json.dumps(about))
        capsys.readouterr()
        study.main([f"--analyse={out}"])
        assert ("out/classes.npz is missing" in capsys.readouterr().out) == has_classes


def test_gaps_to_any_model(out, capsys):
    contents = {path.name: path.read_bytes() for path in out.iterdir()}
    capsys.readouterr()
    study.main([f"--analyse={out}", "--reference=dear"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| slow |")]
    (row,) = [row for row in gaps.compare(files.read(out), "dear") if row.model == "slow"]
    assert f"| {row.gap.text()} |" in line and row.gap.value == pytest.approx(-0.3, abs=0.05)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == contents
    with pytest.raises(UserError, match=r"'deer'.* slow; dear; gain"):
        study.main([f"--analyse={out}", "--reference=deer"])
    with pytest.raises(UserError, match="--analyse=DIR --reference=MODEL"):
        study.main(["--study=demo_order", "--reference=dear"])


STUDIES = Path(__file__).parents[2] / "golden" / "studies"  # one per file format


def assert_same_tables(directory, tmp_path, *, others=()):
    """Analyse a study's data again; the tables must equal its stored tables."""
    (tmp_path / directory.name).mkdir()  # the leaderboard contains the directory's name
    for file in results.DATA:
        if (directory / file).exists() and file != "metrics.npz":
            shutil.copy(directory / file, tmp_path / directory.name)
    results.analyse(tmp_path / directory.name, others=others, quiet=True)
    for file in TABLES:
        assert (tmp_path / directory.name / file).read_bytes() == (directory / file).read_bytes()


@pytest.mark.parametrize("directory", sorted(STUDIES.iterdir()), ids=lambda path: path.name)
def test_golden_studies_reproduce_their_tables(directory, tmp_path):
    assert_same_tables(directory, tmp_path)


def test_golden_studies_cover_all_formats():
    runs, blocks = {}, {}
    for directory in STUDIES.iterdir():
        runs[directory.name] = json.loads((directory / "runs.json").read_text())
        if (directory / "blocks.npz").is_file():
            with np.load(directory / "blocks.npz") as arrays:
                blocks[directory.name] = {arrays[key].dtype.name for key in arrays if key.endswith("/losses")}
    assert blocks["linear"] == {"float16"} and blocks["wsd"] == {"float32"} and "without_blocks" not in blocks
    assert all("config" not in run for run in runs["without_blocks"]["runs"].values())
    assert runs["sweep"]["study"]["sweep"] and runs["protocol_2"]["study"]["protocol"] == 2
    assert all(
        isinstance(speed, int) for speeds in runs["linear"]["study"]["speeds"].values() for speed in speeds.values()
    )
    assert all("card" in speeds for speeds in runs["wsd"]["study"]["speeds"].values())


# -------------------------------------------------------------------------------------------------------- two models
def test_compare_models_of_a_finished_study(out, capsys):
    contents = {path.name: path.read_bytes() for path in out.iterdir()}
    capsys.readouterr()
    study.main([f"--analyse={out}", "--compare", "dear", "gain"])
    output = capsys.readouterr().out
    (row,) = [row for row in gaps.compare(files.read(out), "gain") if row.model == "dear"]
    assert output == words.in_one_line(files.read(out), "dear", "gain") + "\n" and output.count("\n") == 1
    assert row.gap.text() in output and f"p = {row.verdict.p:.2g}" in output
    assert row.gap.value == pytest.approx(0.5, abs=0.05)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == contents
    with pytest.raises(UserError, match=r"'deer'.* slow; dear; gain"):
        study.main([f"--analyse={out}", "--compare", "deer", "gain"])


def test_compare_models_of_a_study_file(models, out, tmp_path, capsys):
    """--out=DIR supplies results of absent runs and stays unchanged."""
    expected = results.compare_two(out, "dear", "slow")
    path = write_study(tmp_path / "study.py", models)
    capsys.readouterr()
    study.main([f"--study={path}", "--compare", "dear", "slow"])
    assert capsys.readouterr().out == f"{expected}\n"
    entries = {label: dict(entry) for label, entry in models.items()}
    for label in ("dear x1 1", "dear x1 2"):
        entries[label]["workdir"] = str(tmp_path / "absent" / label)
    write_study(path, entries)
    study.main([f"--study={path}", "--compare", "dear", "slow"])
    assert "(1 and 3 seeds)" in capsys.readouterr().out
    contents = {file.name: file.read_bytes() for file in out.iterdir()}
    study.main([f"--study={path}", f"--out={out}", "--compare", "dear", "slow"])
    assert capsys.readouterr().out == f"{expected}\n"
    assert {file.name: file.read_bytes() for file in out.iterdir()} == contents


def test_compare_models_by_workdirs(models, tmp_path, capsys):
    """A model's workdirs are its seeds; the config has the training domains."""
    sides = [",".join(models[f"{name} x1 {seed}"]["workdir"] for seed in range(3)) for name in ("dear", "slow")]
    study.main(["--compare", *sides])
    output = capsys.readouterr().out
    assert output.startswith(f"{sides[0]} against {sides[1]}: gap +0.") and "(3 and 3 seeds): costs" in output
    value = float(output.split("gap ")[1].split(" ")[0])
    assert value == pytest.approx(0.3, abs=0.02)
    with pytest.raises(UserError, match=r"--compare: .*absent .*config\.json"):
        study.main(["--compare", str(tmp_path / "absent"), sides[1]])
    for workdir in sides[1].split(",")[:2]:
        shutil.copytree(workdir, tmp_path / workdir.rpartition("/")[2])
    for copy in tmp_path.glob("slow*"):
        config = json.loads((copy / "config.json").read_text())
        config["train"]["seed"] = 7
        (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"/slow x1 0 .*/slow x1 1 .*learning rate"):
        study.main(["--compare", sides[0], ",".join(sorted(map(str, tmp_path.glob("slow*"))))])
    config["data"] = {"train_domains": ["commoncrawl", "c4", *DOMAINS]}
    for copy in tmp_path.glob("slow*"):
        (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="trained on commoncrawl, c4, arxiv, github;"):
        study.main(["--compare", sides[0], str(next(tmp_path.glob("slow*")))])


@pytest.mark.parametrize("more", ["--list", "--partial", "--latex", "--only=0", "--page"])
def test_compare_refuses_other_arguments(more):
    with pytest.raises(UserError, match=r"^--compare A B"):
        study.main(["--analyse=DIR", "--compare", "dear", "slow", more])
