"""Splits from file and folder names."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqjax.data import shards, splits
from seqjax.data.layout import Layout

from .conftest import row, write_shard

OTHER = ["c4", "wiki", "en", "book", "the", "pile", "arxiv", "x", "2020"]
SPLIT = st.sampled_from([(split, word) for split, words in splits.WORDS.items() for word in words])
CASES = st.sampled_from([str.lower, str.upper, str.capitalize])
SEPARATORS = st.sampled_from(["-", "_", ".", " "])


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("val.jsonl", "validation"),
        ("valid.jsonl", "validation"),
        ("dev.jsonl", "validation"),
        ("validation_0.jsonl", "validation"),
        ("test_set.parquet", "test"),
        ("c4-validation.00000-of-00001.json.gz", "validation"),
        ("c4-af-validation.00000-of-00001.json.gz", "validation"),
        ("c4-train.00000-of-01024.json.gz", "train"),
        ("wiki.valid.raw.jsonl", "validation"),
        ("ValidationSet.parquet", "validation"),
        ("held_out.jsonl", "validation"),
        ("hold-out-3.jsonl.zst", "validation"),
        ("testset.jsonl", "test"),
        ("devtest.jsonl", "validation"),
        ("VAL.JSONL", "validation"),
        ("val0.ndjson", "validation"),
        ("val/a.jsonl", "validation"),
        ("eval/a.jsonl", "validation"),
        ("Validation/a.jsonl", "validation"),
        ("dev_set/deep/a.jsonl", "validation"),
        ("test-2/a.jsonl", "test"),
        ("train/chunk1/example_holdout_0.jsonl.zst", "train"),
        ("validation/train/a.jsonl", "train"),
        ("train-test.jsonl", "train"),
        ("latest.jsonl", "train"),
        ("testimony.jsonl", "train"),
        ("values.jsonl", "train"),
        ("my-dev-set/a.jsonl", "train"),
        ("val.txt", "validation"),
        ("test_2.txt", "test"),
        ("the-test-of-time.txt", "train"),
    ],
)
def test_common_file_names(tmp_path: Path, name: str, split: str):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).touch()
    (shard,) = shards.find_shards(str(tmp_path), layout=Layout(domain="x"))
    assert shard.split == split


@given(
    before=st.lists(st.sampled_from(OTHER), max_size=2),
    named=SPLIT,
    case=CASES,
    after=st.lists(st.sampled_from([*OTHER, "0", "00000", "of", "set"]), max_size=3),
    separator=SEPARATORS,
)
def test_split_word_in_a_name_decides(before, named, case, after, separator):
    split, word = named
    assert splits.split_of(separator.join([*before, case(word), *after])) == split


@given(named=SPLIT, case=CASES, neutral=st.sampled_from(["", "set", "0", "part 1"]), separator=SEPARATORS)
def test_folder_with_only_split_words_decides(named, case, neutral, separator):
    split, word = named
    folder = separator.join([case(word), *neutral.split()])
    assert splits.split_of(f"{folder}/chunk1/a") == split
    assert splits.split_of(f"x/{folder}/val") == split


@given(st.lists(st.sampled_from(OTHER), min_size=1, max_size=3), SPLIT, SEPARATORS)
def test_look_alikes_of_training_files(words, named, separator):
    split, word = named
    plain = separator.join(["c4", *words])
    assert (splits.split_of(plain), splits.look_alikes([plain])) == ("train", [])
    for name in (f"{plain}{separator}{word}/a", f"train/{word}", f"train{word}"):
        assert splits.split_of(name) == "train"
        assert bool(splits.look_alikes([name])) == (split != "train"), name


def test_find_shards_reports_look_alikes(tmp_path: Path):
    messages: list[str] = []
    for name in ("train/a.jsonl.zst", "train/val.jsonl.zst", "my-dev-set/b.jsonl.zst", "contest.jsonl.zst"):
        write_shard(tmp_path / name, [row("c4", "x")])
    (tmp_path / "c.csv").touch()
    shards.find_shards(str(tmp_path), on_message=messages.append)
    assert [line.strip() for line in messages if line.startswith("  ")] == ["contest", "my-dev-set/", "train/val"]
    assert any(".csv" in line for line in messages)


def test_domain_folder_may_contain_a_split_word():
    layout = Layout(domain_from="folder")
    assert layout.file_domain("Validation/news/a.jsonl") == "news"
    assert layout.file_domain("unit-test/a.jsonl") == "unit-test"
