"""leaderboard.csv and the LaTeX table."""

import dataclasses
import math
import re

import pytest

from seqjax.errors import UserError
from seqjax.study import gaps
from seqjax.study.gaps import statistics
from seqjax.study.report import leaderboard
from tests.study.gaps.studies import records, run
from tests.study.report.conftest import side

SPECIFIED = (
    *("study", "reference", "model", "parameters", "commit", "manifest"),
    *("seeds", "reference_seeds", "rates", "edge", "next_rate"),
    *("loss", "tokens", "mid_rate", "octaves", "beyond"),
    *("gap", "lo", "hi", "df", "verdict", "needs", "provisional", "as_tuned", "by_rate"),
    *("se_seeds", "se_ref", "se_rate", "se_beyond", "se_docs"),
    *("per_doubling", "per_doubling_half", "tokens_in", "tokens_in_half", "tokens_out", "tokens_out_half", "copy"),
    *("speedup", "speedup_lo", "speedup_hi", "card", "length", "arxiv", "github"),
)


def lines_by_model(study):
    return {line["model"]: line for line in leaderboard.rows(study)}


def test_column_order(known):
    assert [list(line) for line in leaderboard.rows(known)] == [list(SPECIFIED)] * 6
    assert leaderboard.csv_text(leaderboard.rows(known)).splitlines()[0] == ",".join(SPECIFIED)


def test_csv_numbers_match_rows(known):
    for row in gaps.compare(known, "reference"):
        line = lines_by_model(known)[row.model]
        assert (line["verdict"], line["needs"]) == (row.verdict.word, row.verdict.needs)
        assert line["gap"] == (row.gap and row.gap.value)
        assert (line["arxiv"], line["github"]) == tuple(row.gaps[d].value if row.gaps else None for d in known.domains)
        if row.gap is not None and row.gap.half is not None:
            assert (line["lo"] + line["hi"]) / 2 == pytest.approx(row.gap.value)
            error = math.sqrt(sum(line[f"se_{part}"] ** 2 for part in ("seeds", "ref", "rate", "beyond", "docs")))
            assert (line["hi"] - line["lo"]) / 2 == pytest.approx(error * statistics.quantile(line["df"], 0.975))
    dear, one_seed, far = (lines_by_model(known)[name] for name in ("dear", "alone", "far"))
    assert (dear["study"], dear["reference"], dear["parameters"]) == ("known", "reference", 104_000_000)
    assert (dear["seeds"], dear["reference_seeds"], dear["commit"]) == (3, 3, "commit 0;commit 1;commit 2")
    assert dear["gap"] == pytest.approx(0.3, abs=0.02) and dear["lo"] > 0
    assert (one_seed["lo"], one_seed["hi"], one_seed["df"]) == (None, None, None) and one_seed["gap"] is not None
    assert far["gap"] is None and far["needs"] == "ends from 50%" and far["tokens_out"] is not None


def test_rates_are_learning_rates(known):
    dear, one_seed = lines_by_model(known)["dear"], lines_by_model(known)["alone"]
    assert (dear["rates"], dear["edge"], dear["next_rate"]) == (
        "0.001;0.002",
        "lowest;reference lowest",
        "0.0005;reference 0.0005",
    )
    assert (one_seed["rates"], one_seed["edge"], one_seed["next_rate"]) == (
        "0.002",
        "only;reference lowest",
        "0.001;reference 0.0005",
    )
    by_rate = dict(part.split(":") for part in dear["by_rate"].split(";"))
    assert list(by_rate) == ["0.001", "0.002"] and all(abs(float(gap) - 0.3) < 0.03 for gap in by_rate.values())
    assert one_seed["mid_rate"] == f"{1e-3 * 2 ** ((1 + 1 / 6) / 2):.3g}", "halfway to the reference's mean rate"
    assert one_seed["octaves"] == pytest.approx(1 - 1 / 6)
    assert one_seed["as_tuned"] - one_seed["gap"] == pytest.approx(-0.05 * one_seed["octaves"], abs=0.003)
    unknown = dataclasses.replace(known, runs=[dataclasses.replace(run, metadata={}) for run in known.runs])
    assert lines_by_model(unknown)["alone"]["rates"] == "x2"


def test_speed_ups_name_their_card_and_length(known):
    same, dear = lines_by_model(known)["same"], lines_by_model(known)["dear"]
    assert (same["card"], same["length"]) == ("H200", 2048)
    assert same["speedup_lo"] < 0.5 < same["speedup_hi"] and same["speedup"] == pytest.approx(0.5, abs=0.03)
    assert (dear["card"], dear["length"], dear["speedup"]) == ("", None, None), "its speed is not known"
    old = dataclasses.replace(known, conditions={})
    assert (lines_by_model(old)["same"]["card"], lines_by_model(old)["same"]["length"]) == ("H200, 2,048 tokens", None)


def test_speed_up_bound_fills_one_column():
    study = records(
        [*side("reference", 0.0), *side("bad", 3.0), *side("good", -3.0)],
        speeds={"c": {"reference": 1.0, "bad": 1.0, "good": 1.0}},
    )
    bad, good = (lines_by_model(study)[name] for name in ("bad", "good"))
    assert bad["speedup"] is bad["speedup_lo"] is None and bad["speedup_hi"] == pytest.approx(0.5)
    assert good["speedup"] is good["speedup_hi"] is None and good["speedup_lo"] == pytest.approx(2.0)


def test_csv_round_trip(known, tmp_path):
    lines = leaderboard.rows(known)
    (tmp_path / "a.csv").write_text(leaderboard.csv_text(lines))
    for line, read in zip(lines, leaderboard.read(tmp_path / "a.csv"), strict=True):
        assert list(read) == list(line)
        for name, value in line.items():
            assert read[name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name


def test_studies_with_different_domains_share_a_file(known, tmp_path):
    other = [{"study": "x", "reference": "r", "model": "m", "book": 0.5}]
    (tmp_path / "a.csv").write_text(leaderboard.csv_text([*leaderboard.rows(known), *other]))
    *_, last = leaderboard.read(tmp_path / "a.csv")
    assert (last["book"], last["arxiv"], last["gap"], last["study"]) == (0.5, None, None, "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("reference_seeds", "reference seeds"), r"line 1: .* reference_seeds"),
        (("0.001;0.002,", "0.001;0.002,,"), "values in"),
        ((",no,", ",no,x"), "row 1: .*'x"),
    ],
    ids=("column", "cell", "value"),
)
def test_damaged_file_is_reported(known, tmp_path, change, message):
    text = leaderboard.csv_text(leaderboard.rows(known)).replace(",yes,", ",no,").replace(*change)
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=rf"a\.csv, {message}" if message[0] == "r" or message[0] == "l" else message):
        leaderboard.read(tmp_path / "a.csv")


def test_latex_table(known):
    named = dataclasses.replace(known, title="50% & more", name="a_b")
    text = leaderboard.latex(named, leaderboard.compared(named))
    (dear,) = [line for line in text.splitlines() if line.startswith("dear & ")]
    row = next(row for row in gaps.compare(known, "reference") if row.model == "dear")
    assert dear == rf"dear & 104.0 & 3 & 0.001, 0.002 & $+{row.gap.value:.3f} \pm {row.gap.half:.3f}$ & {row.text} \\"
    assert text.count(r"\\") == 1 + 1 + 6 and text.count(r"\midrule") == 2
    assert r"ends from 50\%" in text
    assert text.count("{") == text.count("}")


def test_tex_characters_are_escaped():
    assert leaderboard.escaped("a_b & 5% ± #1 {x} ~ ^ \\ $") == (
        r"a\_b \& 5\% $\pm$ \#1 \{x\} \textasciitilde{} \textasciicircum{} \textbackslash{} \$"
    )
    assert not re.search(r"(?<!\\)[&%#_]", leaderboard.escaped("&%#_" * 3))


def test_joined_study_adds_seeds_but_no_rows():
    shared = {"manifest": "m", "config": {"optim": {"lr": 1e-3}}}
    study = records([run(m, gap=0.3 * (m == "bad"), metadata=shared) for m in ("reference", "bad")], name="own")
    noise = (0.0, 0.01, -0.01)
    further_seeds = [
        run(m, seed=s, gap=0.3 * (m == "bad") + noise[s], metadata=shared) for m in ("reference", "bad") for s in (1, 2)
    ]
    other = records([*further_seeds, run("only here", metadata=shared)], name="other")
    (single,) = leaderboard.compared(study)["reference"]
    (joined,) = leaderboard.compared(study, others=[other])["reference"]
    assert single.verdict.word == "undecided" and single.gap.interval is None
    assert joined.verdict.word == "costs" and joined.seeds == 3
    (line,) = leaderboard.rows(study, {"reference": (joined,)})
    assert line["seeds"] == 3 and line["verdict"] == "costs"
