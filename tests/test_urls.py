"""What is a URL, and where a run can be kept."""

from pathlib import Path

import pytest

from seqjax import store
from seqjax.commands.train import main
from seqjax.data.prepare import prepare
from seqjax.data.shards import find_shards
from seqjax.errors import UserError
from seqjax.training.mirrors import Mirror


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("runs/x", ""),
        ("/runs/x:/y", ""),
        ("s3://bucket/run", "s3://bucket/run"),
        ("s3://bucket/run/", "s3://bucket/run"),
        (Path("gs://bucket/run"), "gs://bucket/run"),  # a Path keeps one slash
        ("memory://run", "memory://run"),
    ],
)
def test_what_is_a_url(path, url):
    assert store.url_of(path) == url
    assert store.location(str(path)) == (url or Path(path))
    assert store.is_remote(path) == bool(url)


@pytest.mark.parametrize("workdir", ["s3://bucket/run", "https://host/run", Path("gcs://bucket/x")])
def test_a_run_is_kept_in_no_other_store(workdir):
    with pytest.raises(UserError, match=r"--workdir=\w+:/.* gs://BUCKET/PATH.*, mount .*sync "):
        Mirror(workdir)


def test_a_bucket_is_named():
    with pytest.raises(UserError, match=r"no bucket: .*gs://BUCKET/PATH"):
        Mirror("gs://")


def test_the_commands_refuse_what_cannot_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"--workdir=ftp://host/run: .*kept in"):
        main(["--config=transformer_pp:debug", "--workdir=ftp://host/run"])
    with pytest.raises(UserError, match=r"--out=s3://bucket/blocks: .*this machine"):
        prepare(tmp_path, "s3://bucket/blocks", tokenizer="byte")
    with pytest.raises(UserError, match=r"nonsense://x: Protocol .*nonsense"):
        find_shards("nonsense://x")
    assert list(tmp_path.iterdir()) == []  # no directory called "ftp:"
