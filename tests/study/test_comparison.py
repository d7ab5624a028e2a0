"""What a study concludes: schedules and rates that close a gap, rankings, missing runs and data that differ."""

import json
import shutil

import numpy as np
import pytest

from seqjax.study import __main__ as study
from seqjax.study import comparison, records
from seqjax.study.statistics import Estimate
from seqjax.study.studies import load_study
from seqjax.training import eval_losses
from seqjax.utils import UserError
from tests import support
from tests.study.synthetic import DOMAINS, SHARES, write_run, write_study

pytestmark = pytest.mark.usefixtures("undrawn_pictures")


def compared(tmp_path, runs, **more) -> records.Records:
    """Return the records of a study of runs, label -> fields."""
    path = write_study(tmp_path / "study.py", runs, **more)
    study.main([f"--study={path}", f"--out={tmp_path / 'out'}"])
    return records.read(tmp_path / "out")


def entry(tmp_path, label, in_domain, *, fields=None, **more):
    return {label: {"workdir": str(write_run(tmp_path / label, in_domain, **more)), **(fields or {})}}


def row_of(rows, model):
    return next(row for row in rows if row.model == model)


def report(tmp_path) -> str:
    return (tmp_path / "out" / "gaps.md").read_text()


def test_the_estimate_is_the_gap_of_the_domain_losses_exactly(tmp_path):
    """Documents differ in length; the sums of blocks give what the losses of the evaluations give."""
    runs = entry(tmp_path, "slow", [4.0, 3.0, 2.0], noise=0)
    runs |= entry(tmp_path, "x", [4.1, 3.2, 2.3], noise=1, offset={"arxiv": 0.2, "github": 0.1})
    found = compared(tmp_path, runs)
    gap = comparison.compare(found, "slow")[0].lowest
    assert gap is not None
    assert found.blocks is not None
    blocks, rows = found.blocks.losses["arxiv"], found.blocks.rows
    of_reference = 0.7 * blocks[rows["slow", 2]] + 0.3 * blocks[rows["slow", 1]]
    by_hand = (blocks[rows["x", 2]] - of_reference).mean()
    assert gap.estimates["arxiv"].gap == pytest.approx(0.2, abs=2e-6)
    assert gap.estimates["arxiv"].gap == pytest.approx(by_hand, abs=2e-6)
    natural, equal = (
        sum(w * gap.estimates[d].gap for w, d in zip(s, DOMAINS, strict=True)) for s in (SHARES, (0.5, 0.5))
    )
    assert gap.estimates[comparison.EQUAL].gap == pytest.approx(equal)
    assert gap.estimates[comparison.NATURAL].gap == pytest.approx(natural, abs=1e-5)


def test_documents_in_domain_count_as_well(tmp_path):
    """What differs between the runs only in domain moves the matched loss, and with it the gap by the slope."""
    runs = {}
    for slope in (1.0, 2.0):
        for label, noise in (("slow", 0), ("x", 1)):
            name = f"{label}{slope:g}"
            run = write_run(tmp_path / name, [4.0, 3.0, 2.0], slope=slope, noise=noise)
            quiet = eval_losses.read(write_run(tmp_path / f"quiet-{name}", [4.0, 3.0, 2.0], slope=slope))[1]
            for step, losses in eval_losses.read(run)[1].items():
                eval_losses.write(run, step, losses | {domain: quiet[step][domain] for domain in DOMAINS})
            runs |= {name: {"workdir": str(run)}}
    found = compared(tmp_path, runs, references=("slow1", "slow2"))
    widths = []
    for slope in ("1", "2"):
        gap = row_of(comparison.compare(found, f"slow{slope}"), f"x{slope}").lowest
        assert gap is not None
        widths.append(gap.estimates["arxiv"].half_width)
    assert widths[0] > 0.01
    assert widths[1] == pytest.approx(2 * widths[0], rel=1e-3)


def schedules(tmp_path, *, bend: float):
    """A reference whose shorter schedules end above its own line by `bend`."""
    runs = entry(tmp_path, "slow", [4.0, 3.0, 2.0], noise=0)
    for end, share in ((2.5, 0.8), (3.0, 0.6)):
        fields = {"model": "slow", "schedule": share}
        runs |= entry(tmp_path, f"slow {share}", [4.0, end], fields=fields, offset=bend, noise=0)
    return runs


@pytest.mark.parametrize(
    ("bend", "expected"), [(0.0, "stays"), (0.2, "closed by the schedule"), (0.4, "closed by the schedule")]
)
def test_a_schedule_may_close_a_gap(tmp_path, bend, expected):
    """The gap is 0.2; against end points that lie 0.2 higher it is nothing, and its sign changes at 0.4."""
    runs = schedules(tmp_path, bend=bend) | entry(tmp_path, "x", [4.0, 3.0, 2.5], offset=0.2, noise=1)
    runs |= entry(tmp_path, "y", [4.0, 3.0, 1.9], offset=0.2, noise=1)
    found = compared(tmp_path, runs)
    rows = comparison.compare(found, "slow")
    assert {row.model for row in rows} == {"x", "y"}, "a schedule is no model of its own"
    row = row_of(rows, "x")
    assert row.lowest is not None and row.end_points is not None
    assert row.lowest.estimates["arxiv"].gap == pytest.approx(0.2, abs=1e-5)
    assert row.end_points.estimates["arxiv"].gap == pytest.approx(0.2 - bend, abs=1e-5)
    assert comparison.reading(row, "arxiv") == expected
    assert comparison.reading(row_of(rows, "y"), "arxiv") == "not tested", "it ends below every end point"
    assert f"| x | schedule | {expected}" in report(tmp_path)


def test_a_learning_rate_may_close_a_gap(tmp_path):
    """At the common rate x is worse by 0.2; at three times that rate, its best, by nothing that its documents show."""
    runs = entry(tmp_path, "slow", [4.0, 3.0, 2.0], noise=0)
    runs |= entry(tmp_path, "x", [4.0, 3.0, 2.5], offset=0.2, noise=1)
    runs |= entry(tmp_path, "x fast", [4.0, 3.0, 2.2], noise=1, fields={"model": "x", "rate": 3})
    runs |= entry(tmp_path, "y", [4.0, 3.0, 2.5], offset=0.2, noise=1)
    rows = comparison.compare(compared(tmp_path, runs), "slow")
    row = row_of(rows, "x")
    assert row.rates == (3.0, 1.0)
    assert row.lowest is not None and row.lowest.low == pytest.approx(2.5, abs=1e-5)
    assert row.best_rate is not None and row.best_rate.low == pytest.approx(2.2, abs=1e-5)
    assert comparison.reading(row, "arxiv") == "closed by the learning rate"
    assert row_of(rows, "y").best_rate is None
    assert "x x3, slow x1" in report(tmp_path)
    assert "| x | 2.500, 3.700 | **2.200, 3.200** |" in report(tmp_path), "and none of slow and y, which have one rate"
    assert "Best at the highest rate tried, so that one beyond may suit better: x.\n" in report(tmp_path)
    assert "at the lowest rate tried" not in report(tmp_path)
    assert (tmp_path / "out" / "rates.png").exists()


def reading(lowest, **causes) -> str:
    """The reading of a gap and of those that test other causes, (gap, half the width of its interval) each."""
    gaps = {
        name: None if given is None else comparison.Gap(2.0, 2.0, 3, {"arxiv": Estimate(*given)})
        for name, given in ({"over_range": None, "end_points": None, "best_rate": None} | causes).items()
    }
    row = comparison.Row("x", comparison.Gap(2.0, 2.0, 3, {"arxiv": Estimate(*lowest)}), **gaps, rates=None)
    return comparison.reading(row, "arxiv")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((0.15, 0.1), "stays"),
        ((0.15, None), "stays"),  # without an interval it is not known to be nothing
        ((0.1, 0.1), "closed by the"),
        ((-0.15, 0.1), "closed by the"),
        ((-0.15, None), "closed by the"),
    ],
    ids=str,
)
def test_a_cause_closes_a_gap_by_its_interval_or_its_sign(given, expected):
    for sign in (1, -1):
        one = sign * given[0], given[1]
        for cause, name in (("end_points", "schedule"), ("best_rate", "learning rate")):
            said = reading((sign * 0.2, 0.1), **{cause: one})
            assert said == (f"{expected} {name}" if "closed" in expected else expected)
            other = {"end_points", "best_rate"} - {cause}
            assert reading((sign * 0.2, 0.1), **{cause: one, other.pop(): (sign * 0.3, 0.1)}) == said
        assert reading((sign * 0.1, 0.1), end_points=one) == "none"
        assert reading((sign * 0.2, None), end_points=one) == "no interval"


def test_a_gap_whose_causes_are_not_tested_says_so():
    assert reading((0.2, 0.1)) == reading((0.2, 0.1), over_range=(0.01, None)) == "not tested"
    assert reading((0.2, 0.1), over_range=(-0.01, None)) == "not tested, changes sign"
    assert reading((0.2, 0.1), over_range=(-0.01, None), best_rate=(0.2, 0.1)) == "stays"


def test_a_model_with_one_learning_rate_is_not_tested_for_it(tmp_path):
    """That the reference ran at several says nothing about the rate of the model."""
    runs = entry(tmp_path, "slow", [4.0, 3.0, 2.0], noise=0)
    runs |= entry(tmp_path, "slow fast", [4.0, 3.0, 1.9], noise=0, fields={"model": "slow", "rate": 3})
    runs |= entry(tmp_path, "x", [4.0, 3.0, 2.5], offset=0.2, noise=1)
    row = row_of(comparison.compare(compared(tmp_path, runs), "slow"), "x")
    assert row.best_rate is None
    assert comparison.reading(row, "arxiv") == "not tested"


def test_end_points_are_means_over_seeds_and_domains(tmp_path):
    runs = entry(tmp_path, "slow", [4.0, 2.0], noise=0, offset={"arxiv": 0.2, "github": 0.0})
    runs |= entry(tmp_path, "slow again", [4.0, 1.9, 2.2], noise=0, fields={"model": "slow", "seed": 1})
    runs |= entry(tmp_path, "slow short", [4.0, 2.4], noise=0, fields={"model": "slow", "schedule": 0.5})
    found = compared(tmp_path, runs)
    assert comparison.by_rate(found, "slow") == {1.0: pytest.approx((2.1, 3.15), abs=1e-5)}
    assert comparison.by_schedule(found, "slow") == {
        0.5: pytest.approx((2.4, 3.4), abs=1e-5),
        1.0: pytest.approx((2.1, 3.15), abs=1e-5),
    }
    assert not (tmp_path / "out" / "rates.png").exists(), "no model ran at several rates"


def test_one_seed_ranks_nothing_and_says_so(tmp_path):
    compared(tmp_path, entry(tmp_path, "slow", [4.0, 2.0], noise=0) | entry(tmp_path, "x", [4.0, 2.0], noise=1))
    assert "**Ranking:** none, because there is one seed." in report(tmp_path)
    assert "of documents alone, because there is one seed" in report(tmp_path)


def test_three_seeds_rank_what_can_be_told_apart(tmp_path):
    """a and b differ by less than their seeds show, c is far from both; z has one seed."""
    runs = {}
    offsets = {"slow": (0.0, 0.0, 0.0), "a": (0.26, 0.28, 0.30), "b": (0.34, 0.32, 0.30), "c": (0.9, 0.91, 0.89)}
    for model, of_seed in offsets.items():
        for seed, offset in enumerate(of_seed):
            fields = {"model": model, "seed": seed}
            runs |= entry(tmp_path, f"{model}{seed}", [4.0, 3.0, 2.0], offset=offset, noise=seed, fields=fields)
    runs |= entry(tmp_path, "z", [4.0, 3.0, 2.0], offset=0.5, noise=9)
    found = compared(tmp_path, runs)
    rows = comparison.compare(found, "slow")
    assert comparison.ranking(found, "slow", rows) == [["slow"], ["a", "b"], ["c"]]
    assert "2. a, b\n" in report(tmp_path)
    assert "Not ranked, for want of a second seed or of a common loss: z." in report(tmp_path)
    lowest = row_of(rows, "a").lowest
    assert lowest is not None and lowest.seeds == 3


def test_models_without_intervals_are_not_told_apart(tmp_path):
    runs = {}
    for model, offset in (("slow", 0.0), ("x", 0.9)):
        for seed in (0, 1):
            fields = {"model": model, "seed": seed}
            runs |= entry(tmp_path, f"{model}{seed}", [4.0, 3.0, 2.0], offset=offset, blocks=False, fields=fields)
    found = compared(tmp_path, runs)
    assert comparison.ranking(found, "slow", comparison.compare(found, "slow")) == [["slow", "x"]]


def test_a_pair_without_overlap_is_a_dash(tmp_path):
    runs = entry(tmp_path, "slow", [4.0, 3.0]) | entry(tmp_path, "x", [6.0, 5.0]) | entry(tmp_path, "y", [4.0, 3.0])
    rows = comparison.compare(compared(tmp_path, runs), "slow")
    assert [row.lowest is None for row in rows] == [False, True]
    assert "| x | - | - | - | - |" in report(tmp_path)


def test_what_is_there_is_compared_and_what_is_missing_named(tmp_path, capsys):
    runs = entry(tmp_path, "slow", [4.0, 2.0]) | entry(tmp_path, "x", [4.0, 2.0])
    path = write_study(tmp_path / "study.py", runs | {"later": {"workdir": str(tmp_path / "later")}})
    study.main([f"--study={path}", f"--out={tmp_path / 'out'}", "--partial"])
    assert "**Missing:** later (not begun)." in report(tmp_path)
    with pytest.raises(UserError, match="later is not a run"):
        study.main([f"--study={path}", f"--out={tmp_path / 'out'}"])
    (tmp_path / "slow" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0, "tokens_per_s": 1.0}\n')
    with pytest.raises(UserError, match=r"No reference has results.*slow: no evaluation yet"):
        study.main([f"--study={path}", f"--out={tmp_path / 'out'}", "--partial"])
    capsys.readouterr()


def test_runs_on_different_data_are_refused_by_name(tmp_path):
    runs = entry(tmp_path, "slow", [4.0, 2.0]) | entry(tmp_path, "x", [4.0, 2.0], manifest="other")
    with pytest.raises(UserError, match=r"different data.*slow: manifest m; x: manifest other"):
        compared(tmp_path, runs)


def test_a_domain_without_losses_is_named(tmp_path):
    runs = entry(tmp_path, "slow", [4.0, 2.0]) | entry(tmp_path, "x", [4.0, 2.0])
    with pytest.raises(UserError, match=r"slow was not evaluated on book; it has losses of commoncrawl, c4, arxiv"):
        compared(tmp_path, runs, domains=("arxiv", "book"))
    assert not (tmp_path / "out").exists()


def test_runs_evaluated_on_other_blocks_are_refused_by_name(tmp_path):
    runs = entry(tmp_path, "slow", [4.0, 2.0]) | entry(tmp_path, "x", [4.0, 2.0])
    described = tmp_path / "x" / eval_losses.DIRECTORY / "blocks.npz"
    with np.load(described) as arrays:
        changed = {key: value + key.endswith("index") for key, value in arrays.items()}
    np.savez(described, allow_pickle=False, **changed)
    with pytest.raises(UserError, match="x was evaluated on other blocks than slow"):
        compared(tmp_path, runs)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name",
    support.slow_unless(
        lambda name: name in ("first_110m", "figure4", "books_16k"),
        ["first_110m", "limited_110m", "figure4", "trunks_110m", "demo_order", "books_16k", "hybrids", "switches"],
    ),
)
def test_committed_results_give_the_committed_tables(name, tmp_path):
    committed = support.ROOT / "docs" / "results" / name
    for file in ("runs.json", "points.csv", "blocks.npz", "classes.npz"):
        if (committed / file).exists():
            shutil.copy(committed / file, tmp_path)
    study.main([f"--analyse={tmp_path}"])
    assert (tmp_path / "gaps.md").read_bytes() == (committed / "gaps.md").read_bytes()


def test_without_block_losses_there_are_gaps_and_no_intervals(tmp_path, capsys):
    runs = entry(tmp_path, "slow", [4.0, 2.0]) | entry(tmp_path, "x", [4.0, 2.0], blocks=False, offset=0.1)
    runs |= entry(tmp_path, "y", [4.0, 2.0], offset=0.1)
    rows = comparison.compare(compared(tmp_path, runs), "slow")
    assert "No loss of every block, and so no interval: x." in capsys.readouterr().out
    assert comparison.reading(row_of(rows, "x"), "arxiv") == "no interval"
    assert "| x | 2.000 | +0.100 | +0.100 | +0.100 |" in report(tmp_path)
    assert comparison.reading(row_of(rows, "y"), "arxiv") == "not tested"


def test_a_lost_file_of_an_evaluation_is_told_and_a_lost_row_is_refused(tmp_path, capsys):
    """The file is written after the row: where there is a file, there was a row."""
    runs = entry(tmp_path, "slow", [4.0, 3.0, 2.0]) | entry(tmp_path, "x", [4.0, 3.0, 2.0], offset=0.1)
    compared(tmp_path, runs)
    assert "No loss of every block" not in capsys.readouterr().out
    (tmp_path / "x" / "eval_losses" / "00000001.npz").unlink()
    compared(tmp_path, runs)
    assert "and so no interval, of x where these are lost: 00000001.npz." in capsys.readouterr().out
    rows = (tmp_path / "slow" / "metrics.jsonl").read_text()
    for kept in (rows[:-9], "".join(rows.splitlines(keepends=True)[:-1])):
        (tmp_path / "slow" / "metrics.jsonl").write_text(kept)
        with pytest.raises(UserError, match=r"slow/metrics\.jsonl lacks the evaluation after step 2.*it was cut"):
            compared(tmp_path, runs)


@pytest.mark.parametrize("config", [{"data": 7}, {"data": {"tokenizer": ["byte"]}}, {"train": []}])
def test_a_config_of_another_form_is_named(tmp_path, config):
    runs = entry(tmp_path, "slow", [4.0, 2.0])
    (tmp_path / "slow" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"slow/config\.json: (data|train)\b.* is .*, not "):
        compared(tmp_path, runs)


def test_lost_sums_of_classes_are_told(tmp_path, capsys):
    runs = entry(tmp_path, "slow", [4.0, 2.0])
    compared(tmp_path, runs)
    for classes in (False, True):
        about = json.loads((tmp_path / "out" / "runs.json").read_text())
        about["runs"]["slow"]["config"] = {"eval": {"classes": classes}}
        (tmp_path / "out" / "runs.json").write_text(json.dumps(about))
        capsys.readouterr()
        study.main([f"--analyse={tmp_path / 'out'}"])
        assert ("out/classes.npz is missing" in capsys.readouterr().out) == classes


def test_blocks_are_thinned_to_fit(tmp_path):
    """First to float16, then to the last evaluations of each run; a gap that needs others has no interval."""
    runs = entry(tmp_path, "slow", [5.0, 4.0, 3.0, 2.0]) | entry(tmp_path, "x", [5.0, 4.0, 3.0, 2.0], offset=0.1)
    runs |= entry(tmp_path, "y", [5.0, 4.0], offset=0.1)
    found = load_study(str(write_study(tmp_path / "study.py", runs)))
    collected = records.collect(found.runs, DOMAINS)
    about = {"title": "t", "references": ["slow"], "domains": list(DOMAINS), "against": ["commoncrawl", "c4"]}
    workdirs = {run.label: run.workdir for run in found.runs}
    # 96 blocks in 10 evaluations, and 20 KiB for the rest of the file.
    full, n_bytes = 96 * 10 * 4, 20_480 + 8 * 96
    said = [
        records.write(tmp_path / "out", collected, study=about, missing={}, workdirs=workdirs, max_bytes=size)
        for size in (n_bytes + full, n_bytes + full // 2)
    ]
    assert [len(messages) for messages in said] == [0, 1]
    gap = row_of(comparison.compare(records.read(tmp_path / "out"), "slow"), "x").lowest
    assert gap is not None and gap.estimates["arxiv"].half_width == pytest.approx(0, abs=1e-3)
    messages = records.write(
        tmp_path / "out", collected, study=about, missing={}, workdirs=workdirs, max_bytes=n_bytes + full // 5
    )
    assert "the last 1 evaluations of each run" in messages[1]
    rows = comparison.compare(records.read(tmp_path / "out"), "slow")
    assert comparison.reading(row_of(rows, "x"), "arxiv") != "no interval"
    assert comparison.reading(row_of(rows, "y"), "arxiv") == "no interval", "the reference's second is left out"


def test_tokenizers_are_compared_in_bits_per_byte_and_not_in_nats(tmp_path):
    runs = entry(tmp_path, "slow", [4.0, 3.0, 2.0])
    runs |= entry(tmp_path, "x", [4.0, 3.0, 2.0], offset=0.2, tokenizer="mixtral", manifest="other")
    with pytest.raises(UserError, match=r"different tokenizers \(slow: byte, x: mixtral\).*bits_per_byte"):
        compared(tmp_path, runs)
    rows = comparison.compare(compared(tmp_path, runs, unit="bits_per_byte"), "slow")
    lowest, over = row_of(rows, "x").lowest, row_of(rows, "x").over_range
    assert (lowest.low, lowest.estimates["arxiv"].gap) == pytest.approx((0.5, 0.05), abs=1e-5)
    assert (over.low, over.high) == pytest.approx((0.5, 0.6), abs=1e-5)
    assert lowest.estimates["arxiv"].half_width is None
    assert "Gaps are differences of loss in bits per byte" in report(tmp_path)
    with pytest.raises(UserError, match="name its domains in `against`"):
        compared(tmp_path, runs, unit="bits_per_byte", against=())
    with pytest.raises(UserError, match=r"unit is 'nats' or 'bits_per_byte', not 'bits'"):
        compared(tmp_path, runs, unit="bits")
