"""Sentences about a comparison have the row's numbers."""

import pytest

from seqjax.errors import UserError
from seqjax.study import gaps
from seqjax.study.report import words


def row_for(study, model):
    return next(row for row in gaps.compare(study, "reference") if row.model == model)


@pytest.mark.parametrize(("model", "side"), [("dear", "higher than"), ("gain", "lower than"), ("alone", "higher than")])
def test_sentences_have_verdict_gap_and_interval(known, model, side):
    text, row = words.verdict(known, model, "reference"), row_for(known, model)
    half = "" if row.gap.half is None else f" ± {row.gap.half:.3f}"
    assert f"{abs(row.gap.value):.3f}{half} nats per token {side}" in text
    assert row.text in text and f"{row.loss:.3f}" in text
    for estimate in (*(row.gaps[name] for name in known.domains), *row.at_equal_tokens, row.per_doubling):
        assert estimate.text() in text


def test_sentences_have_parameters_and_tuned_gap(known):
    assert "104.0M parameters, +4.0%." in words.verdict(known, "dear", "reference")
    assert "100.0M parameters." in words.verdict(known, "alone", "reference")
    assert f"As tuned: {row_for(known, 'alone').as_tuned:+.3f}." in words.verdict(known, "alone", "reference")
    assert "As tuned" not in words.verdict(known, "dear", "reference"), "both sides have the same rates"


def test_sentences_without_gap_have_equal_tokens_and_reason(known):
    row = row_for(known, "far")
    for text in (words.verdict(known, "far", "reference"), words.in_one_line(known, "far", "reference")):
        assert row.why in text and row.at_equal_tokens.outside.text() in text


def test_one_line_has_interval_and_p_value(known):
    row, line = row_for(known, "same"), words.in_one_line(known, "same", "reference")
    assert f"gap {row.gap.text()} nats per token" in line and f"p = {row.verdict.p:.2g} (3 and 3 seeds)" in line
    assert f"as tuned {row.as_tuned:+.3f}" in line and line.endswith(f": {row.text}.")
    swapped = words.in_one_line(known, "reference", "same")
    assert swapped.startswith("reference against same: gap ")


def test_models_are_grouped_by_verdict(known):
    groups = words.in_words(known, "reference")
    assert [text.split(" (")[0] for text in groups["gains"]] == ["gain"]
    assert [text.split(" (")[0] for text in groups["costs"]] == ["dear", "shrinks"]
    undecided = "; ".join(groups["undecided"])
    assert "far (no gap*; needs: ends from 50%)" in undecided and "one seed" in undecided
    assert sum(map(len, groups.values())) == 6


def test_unknown_model_is_refused(known):
    with pytest.raises(UserError, match=r"'y'.* reference; dear; gain"):
        words.verdict(known, "y", "reference")
    with pytest.raises(UserError, match=r"dear .*itself.* reference; dear"):
        words.in_one_line(known, "dear", "dear")
