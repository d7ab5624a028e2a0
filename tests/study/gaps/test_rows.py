"""Rows: variance parts, single seeds, provisional marks, test families."""

import dataclasses

import numpy as np
import pytest

from seqjax.errors import UserError
from seqjax.study import gaps
from seqjax.study.gaps import compare, rows, statistics
from seqjax.study.runs.record import UNITS
from tests.study.gaps.studies import records, run

NOISE = np.random.default_rng(0).normal(scale=0.02, size=(30, 3))


def several(model, *, index, gap=0.0, rates=(1.0,), seeds=3, **more):
    """Return runs with `seeds` seeds at the first rate and one at each other rate."""
    pairs = [(rates[0], s) for s in range(seeds)] + [(rate, 0) for rate in rates[1:]]
    return [run(model, gap=gap + NOISE[index, s], rate=rate, seed=s, slope=-0.05, **more) for rate, s in pairs]


def study(**more):
    runs = several("reference", index=0, rates=(1, 2))
    runs += [
        r for i in range(1, 7) for r in several(f"m{i}", index=i, gap=0.1 * (i - 1), rates=(2, 1) if i < 3 else (1,))
    ]
    return records(runs, **more)


def by_model(study_records, reference="reference"):
    return {row.model: row for row in compare(study_records, reference)}


def test_gap_is_the_seed_mean_with_variance_from_both_sides():
    by_name = by_model(study())
    row = by_name["m4"]
    # The reference's first seed also ran the higher rate; its height differs only by the slope.
    level = NOISE[4].mean() - NOISE[0].mean()
    assert row.gap.value == pytest.approx(0.3 + level, abs=1e-6)
    common = statistics.spread([list(NOISE[i]) for i in range(7)])
    for name, index in (("seeds", 4), ("reference", 0)):
        assert row.parts[name] == pytest.approx(common.shrunk(list(NOISE[index])).variance / 3, rel=1e-3)
    assert row.parts["beyond"] == row.parts["text"] == 0 and row.parts["rate"] == pytest.approx(0, abs=1e-12)
    assert row.gap.error == pytest.approx(np.sqrt(sum(row.parts.values())))
    assert row.verdict.word == "costs" and (row.seeds, row.reference_seeds) == (3, 3)
    assert [row.model for row in compare(study(), "reference")][-1] == "m6"


def test_octaves_and_the_gap_as_tuned():
    row = by_model(study())["m1"]  # three seeds at 2, one of them at 1 as well
    ours, theirs = (0.5 + 1 + 1) / 3, (0.5 + 0 + 0) / 3
    assert row.octaves == pytest.approx(ours - theirs) and row.mid_rate == pytest.approx(2 ** ((ours + theirs) / 2))
    assert row.as_tuned == pytest.approx(row.gap.value - 0.05 * row.octaves)
    assert row.by_rate.keys() == {1.0, 2.0}


def test_rate_variance_grows_with_rate_distance():
    runs = several("reference", index=0)
    runs += [run(f"s{i}", rate=r, slope=-0.05 + 0.02 * i) for i in (-1, 0, 1) for r in (1, 2)]
    runs += several("near", index=1) + several("far", index=2, rates=(8,))
    by_name = by_model(records(runs))
    assert by_name["near"].parts["rate"] == 0
    tau = np.std([-0.07, -0.05, -0.03], ddof=1)
    assert by_name["far"].parts["rate"] == pytest.approx(9 * tau**2 * (1 / 3 + 1 / 2))


def test_documents_widen_the_interval():
    plain, drawn = by_model(study()), by_model(study(blocks=10))
    assert drawn["m3"].parts["text"] > 0 and plain["m3"].parts["text"] == 0
    assert drawn["m3"].gap.value == pytest.approx(plain["m3"].gap.value, abs=1e-9)
    assert by_model(study(blocks=10))["m3"].gap.half == drawn["m3"].gap.half  # the draws are always the same


def test_reading_past_reference_ends_adds_variance():
    far = several("far", index=1, last=3.28)  # 0.03 above the reference's first end
    bent = [run("bent", seed=s, of_end=lambda t, s=s: 0.02 * s * np.log2(t)) for s in range(3)]
    by_name = by_model(records(several("reference", index=0) + far + bent))
    assert by_name["far"].beyond == pytest.approx(0.03) and by_name["far"].parts["beyond"] > 0
    assert by_name["bent"].parts["beyond"] == 0


def test_single_seed_verdict_needs_five_models_with_seeds():
    one = run("one", gap=0.4)
    row = by_model(dataclasses.replace(study(), runs=[*study().runs, one]))["one"]
    assert row.gap.interval is None and row.verdict.word == "costs" and "one seed" in row.marks
    few = [r for r in study().runs if r.model in ("reference", "m1", "m2", "m3", "m4")]
    row = by_model(dataclasses.replace(study(), runs=[*few, one]))["one"]
    assert row.verdict.word == "undecided" and "seeds" in row.verdict.needs


def test_single_seed_study_needs_seeds_of_both():
    (row,) = compare(records([run("reference"), run("m", gap=0.4)]), "reference")
    assert (row.verdict.word, row.verdict.needs) == ("undecided", "2 more seeds of both")


def test_provisional_and_next_rates():
    by_name = by_model(study())
    assert by_name["m4"].provisional and by_name["m4"].edge == "only" and by_name["m4"].marks.endswith("*")
    assert by_name["m4"].next_rates["reference"] == pytest.approx(0.5)
    inside = records([run(m, rate=r, last=3.0 + 0.01 * (r != 2)) for m in ("reference", "m") for r in (1, 2, 4)])
    (row,) = compare(inside, "reference")
    assert not row.provisional and row.next_rates == {}


def test_models_in_asks_form_one_family():
    borderline = [r for i in range(7, 27) for r in several(f"x{i}", index=i, gap=0.045)]
    crowd = records([*several("reference", index=0), *borderline])
    undecided = [row for row in compare(crowd, "reference") if row.verdict.word == "undecided"]
    name = min(undecided, key=lambda row: row.verdict.p).model
    single_row = by_model(dataclasses.replace(crowd, asks=(name,)))[name]
    assert single_row.verdict.word == "costs" and single_row.gap == by_model(crowd)[name].gap


def test_reference_with_one_end_has_equal_tokens_only():
    runs = [run(m, shares=(1.0,), seed=s, gap=0.2 * (m == "m")) for m in ("reference", "m") for s in range(3)]
    (row,) = compare(records(runs), "reference")
    assert row.gap is None and "one end" in row.why and row.verdict.needs == "ends from 50%"
    assert row.at_equal_tokens.outside.value == pytest.approx(0.2)


def test_missing_gap_has_a_reason():
    runs = [*several("reference", index=0), run("far", last=2.5, shares=(1.0,)), run("rate", rate=4)]
    by_name = by_model(records(runs))
    assert by_name["far"].gap is None and by_name["far"].verdict.needs == "ends from 50%" and by_name["far"].why
    assert by_name["rate"].gap is None and by_name["rate"].verdict.needs == "another rate" and by_name["rate"].why


@pytest.mark.parametrize("changed", [{"optim": {"name": "muon"}}, {"optim": {"schedule": "cosine"}}])
def test_other_optimisers_and_schedules_are_separate(changed):
    """Models with another optimiser or schedule have no gap and change no number of the others, and conversely."""
    adam = {"config": {"optim": {"b1": 0.9}, "train": {}}}
    other = {"config": {"optim": adam["config"]["optim"] | changed["optim"], "train": {}}}
    ours = [dataclasses.replace(r, metadata=adam) for r in study().runs]
    theirs = [
        dataclasses.replace(r, model=f"other {r.model}", label=f"other {r.label}", metadata=other)
        for r in [*several("reference", index=8), *several("m1", index=9, rates=(1, 4)), *several("m2", index=10)]
    ]
    both = records([*ours, *theirs], references=("reference", "other reference"), blocks=4)
    rows_ours, rows_theirs = by_model(both), by_model(both, "other reference")
    separate = by_model(records(ours, blocks=4))
    assert {name for name, row in rows_ours.items() if row.gap is None} == {r.model for r in theirs}
    assert {name for name, row in rows_theirs.items() if row.gap is None} == {r.model for r in ours}
    assert rows_ours["other m1"].why and rows_ours["other m1"].at_equal_tokens is None
    for name, row in separate.items():
        assert rows_ours[name].gap.value == pytest.approx(row.gap.value, abs=1e-12)
        assert rows_ours[name].parts["rate"] == row.parts["rate"] and rows_ours[name].verdict.word == row.verdict.word


def test_thresholds_scale_with_the_loss_unit():
    bits = by_model(study(unit=UNITS["bits_per_byte"]))
    assert bits["m4"].verdict.word == "costs" and bits["m4"].gap == by_model(study())["m4"].gap
    far = [run("far", last=2.97, shares=(1.0,))]  # 0.03 below the reference: within 0.05 nats, not within 0.017 bits
    with_far = dataclasses.replace(study(), runs=[*study().runs, *far])
    assert by_model(with_far)["far"].gap is not None
    assert by_model(dataclasses.replace(with_far, unit=UNITS["bits_per_byte"]))["far"].gap is None


def test_unknown_reference_is_refused():
    with pytest.raises(UserError, match="m1"):
        compare(study(), "nobody")


def test_estimates_are_the_gaps():
    estimates = gaps.estimates(study(), "m3")
    assert estimates.keys() == {"reference", "m1", "m2", "m4", "m5", "m6"}
    assert estimates["m4"].value == pytest.approx(-gaps.estimates(study(), "m4")["m3"].value, abs=0.002)


def test_variance_parts_match_leaderboard_names():
    assert set(by_model(study())["m1"].parts) == set(rows.PARTS)


def test_loss_unit_changes_only_numbers():
    """Bits per byte are a third of the nats here; the study has noise and several rates."""
    unit = UNITS["bits_per_byte"]

    def scaled(one):
        points = [p._replace(domains={name: unit.scale * x for name, x in p.domains.items()}) for p in one.points]
        return dataclasses.replace(one, points=points, ends=points)

    runs = [*several("reference", index=0, rates=(1, 2)), run("one", gap=0.06)]
    for i in range(1, 7):
        rates, of_end = (2, 1) if i < 3 else (1,), lambda share, i=i: 0.003 * float(np.sin(50 * share + i))
        runs += several(f"m{i}", index=i, gap=0.02 * (i - 3), rates=rates, of_end=of_end)
        runs += [run(f"m{i}", rate=4, last=3.05, gap=0.1)] * (i < 3)  # 0.05 nats above the best rate, so not near-best
    nats, bits = records(runs), records([scaled(one) for one in runs], unit=unit)
    tables = [compare(scaled_records, "reference") for scaled_records in (nats, bits)]
    assert len({row.verdict.word for row in tables[0]}) > 2
    for in_nats, in_bits in zip(*tables, strict=True):
        word = in_nats.verdict.word.replace("0.05", f"{unit.scale * 0.05:.2g}")
        assert (in_nats.model, word, in_nats.verdict.needs) == (
            in_bits.model,
            in_bits.verdict.word,
            in_bits.verdict.needs,
        )
        assert (in_nats.seeds, in_nats.marks, in_nats.why) == (in_bits.seeds, in_bits.marks, in_bits.why)
        assert (in_nats.gap is None) == (in_bits.gap is None)
        if in_nats.gap is not None:
            assert in_bits.gap.value == pytest.approx(unit.scale * in_nats.gap.value, abs=1e-9)
