"""Paths and URLs, object stores in memory and on a server, and refused access."""

import dataclasses
import datetime
import importlib
import time
from pathlib import Path

import pytest

from seqjax import store
from seqjax.commands import cli
from seqjax.data import open_corpus, open_test_sets
from seqjax.errors import UserError
from tests import object_servers, support


@pytest.mark.parametrize(
    ("url", "how"), [("s3://bucket/x", "Install s3fs to access S3"), ("gs://bucket/x", r"pip install 'seqjax\[gcs\]'")]
)
def test_missing_package_is_named(url, how, monkeypatch):
    def missing(url):
        raise ImportError("Install s3fs to access S3")  # as fsspec says

    monkeypatch.setattr(store.fsspec.core, "url_to_fs", missing)
    with pytest.raises(UserError, match=rf"{url} .*{how}"):
        store.read(url)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("a/b", Path("a/b")),
        ("./a//b/", Path("a/b")),
        (".", Path()),
        ("//a//b/", Path("/a/b")),
        ("///a", Path("/a")),
        ("/", Path("/")),
        ("~", Path("/home/me")),
        ("~/a", Path("/home/me/a")),
        ("a/~", Path("a/~")),
        ("file:///a/b", Path("/a/b")),
        ("file:/a", Path("/a")),
        ("local:///a", Path("/a")),
        (" a ", Path(" a ")),
        ("s3://bucket/a/", "s3://bucket/a"),
        (Path("gs://bucket/a"), "gs://bucket/a"),
        ("zip://a::s3://bucket/b.zip", "zip://a::s3://bucket/b.zip"),
    ],
)
def test_location_normalises_paths(text, path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert store.location(text) == path
    assert store.location(path) == path
    assert store.location(str(path)) == path


def test_relative_path_that_resembles_a_url_is_local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("~a", "~", "file:x", "data:x", "a:b"):
        assert store.location(f"./{name}") == tmp_path / name
        assert store.location(store.location(f"./{name}")) == tmp_path / name


def test_parent_of_a_link_is_resolved(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    (tmp_path / "loop").symlink_to("loop")
    assert store.location(tmp_path / "link" / "x") == tmp_path / "link" / "x"
    assert store.location(f"{tmp_path}/link/../x") == tmp_path / "a" / "x"
    assert store.location(f"{tmp_path}/loop/../x") == tmp_path / "x"
    assert store.location(f"{tmp_path}/absent/../x") == tmp_path / "x"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a\\b",
        "C:\\a",
        "a::b",
        "a\nb",
        "file:a\nb",
        "~no_such_user\n",
        "a\n\0",
        "file:a",
        "local:a",
        "file://host/a",
        "~no_such_user/a",
        "a\0b",
        "a\udce9",
        "n" * 256,
    ],
    ids=ascii,
)
def test_ambiguous_paths_are_refused(text):
    with pytest.raises(UserError) as caught:
        store.location(text)
    assert "\n" not in str(caught.value)


def test_command_options_refuse_invalid_paths():
    """Check all path options."""
    dry = ["--config=transformer_pp:debug", "--dry_run", "--config.train.batch_size=8"]
    for command, argv in (
        ("train", ["--config=transformer_pp:debug", "--workdir=PATH"]),
        ("train", [*dry, "--init_from=PATH"]),
        ("train", ["--config=PATH.py"]),
        ("evaluate", ["--workdir=PATH"]),
        ("generate", ["--workdir=PATH"]),
        ("generate", ["--workdir=runs/x", "--prompts=PATH"]),
        ("prepare", ["--source=PATH", "--out=x", "--tokenizer=byte"]),
        ("prepare", ["--source=x", "--out=PATH", "--tokenizer=byte"]),
        ("prepare", ["--source=x", "--out=y", "--tokenizer=huggingface", "--tokenizer_path=PATH"]),
        ("study", ["--study=PATH.py", "--list"]),
        ("study", ["--study=figure3d", "--out=PATH"]),
        ("study", ["--analyse=PATH"]),
        ("study", ["--analyse=x", "--runs=PATH"]),
        ("judge", ["--config=transformer_pp:debug", "--dry_run", "--out=PATH"]),
        ("judge", ["--config=transformer_pp:debug", "--dry_run", "--references=PATH"]),
        ("judge", ["--config=transformer_pp:debug", "--dry_run", "--runs=PATH"]),
        ("recall", ["--size=demo", "--report", "--out=PATH"]),
        ("niah", ["--workdir=PATH", "--lengths=64"]),
        ("repeats", ["--workdir=PATH"]),
        ("harness", ["--workdir=PATH", "--tasks=paper"]),
        ("harness", ["--workdir=x", "--tasks=paper", "--out=PATH"]),
        ("convert", ["import", "--weights=PATH", "--workdir=x"]),
        ("convert", ["import", "--weights=x", "--workdir=PATH"]),
        ("convert", ["export", "--workdir=PATH", "--out=x"]),
        ("convert", ["export", "--workdir=x", "--out=PATH"]),
    ):
        main = importlib.import_module(cli.COMMANDS[command][0]).main
        with pytest.raises(UserError, match=r"no_such_user"):
            main([word.replace("PATH", "~no_such_user/x") for word in argv])


@pytest.mark.parametrize("setting", ["path", "cache_dir", "tokenizer_path"])
def test_data_settings_refuse_invalid_paths(setting, blocks_dir):
    bad = "~no_such_user/x"
    config = dataclasses.replace(support.run_config(blocks_dir).data, **{setting: bad})
    with pytest.raises(UserError, match=r"no_such_user"):
        open_corpus(config, seq_len=support.SEQ_LEN, vocab_size=512)
    with pytest.raises(UserError, match=r"no_such_user"):
        open_test_sets(dataclasses.replace(config, path=""), [bad], seq_len=support.SEQ_LEN, vocab_size=512)


def check_objects(root: str, tmp_path: Path) -> None:
    """Run every store operation, also with folders in names and empty objects."""
    assert store.sizes(root) == {}
    assert store.read(f"{root}/a") is None
    assert store.modified(f"{root}/a") is None
    store.remove(f"{root}/a")
    store.write(f"{root}/a", b"12")
    store.write(f"{root}/b/c/d", b"")
    store.write(f"{root}/a", b"123")
    assert store.sizes(root) == {"a": 3, "b/c/d": 0}
    before = store.versions(root)
    store.write(f"{root}/a", b"321")
    assert {name for name, version in store.versions(root).items() if before[name] != version} == {"a"}
    store.write(f"{root}/a", b"123")
    assert store.sizes(f"{root}/b") == {"c/d": 0}
    assert store.read(f"{root}/a") == b"123"
    changed = store.modified(f"{root}/a")
    assert changed is not None
    assert abs((datetime.datetime.now(datetime.UTC) - changed).total_seconds()) < 60
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * 1000)
    store.write(f"{root}/e", file.read_bytes())
    with store.reading(f"{root}/e") as opened:
        assert opened.read(3) == b"\0\1\2"
    store.download(f"{root}/e", tmp_path / "new" / "copy")
    assert (tmp_path / "new" / "copy").read_bytes() == file.read_bytes()
    with pytest.raises(store.StoreError, match=r"/none .*not exist"):
        store.download(f"{root}/none", tmp_path / "new" / "none")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["copy"]
    store.remove(f"{root}/a")
    assert store.sizes(root) == {"b/c/d": 0, "e": 256_000}


def test_memory_store(memory, tmp_path):
    check_objects(memory, tmp_path)
    assert store.create(f"{memory}/once", b"1")
    assert not store.create(f"{memory}/once", b"2")
    assert store.read(f"{memory}/once") == b"1"


def test_server_store(server, tmp_path):
    check_objects(server.url, tmp_path)
    assert store.create(f"{server.url}/once", b"1")
    assert not store.create(f"{server.url}/once", b"2")
    assert store.read(f"{server.url}/once") == b"1"
    with pytest.raises(store.StoreError, match=r"another-bucket.* not exist"):
        store.sizes(server.url.replace(object_servers.BUCKET, "another-bucket"))


@pytest.mark.parametrize("url", ["gs://bucket/..", "gs://bucket/a/../b", "gs://bucket/."])
def test_workdir_url_must_not_contain_dots(url):
    with pytest.raises(UserError, match=r"`\.` and `\.\.`"):
        store.require_workdir(url)


@pytest.mark.parametrize(
    "url", ["reference://::/x", "dask://host:1/x", "zip://a::DASK://host", "file://a::reference://b"]
)
def test_code_running_schemes_are_refused(url):
    for operation in (store.read, store.sizes, store.filesystem):
        with pytest.raises(UserError, match="the scheme "):
            operation(url)
    with pytest.raises(UserError, match="the scheme "), store.reading(url):
        pass


def test_store_errors_hide_passwords(monkeypatch):
    def refused(url):
        raise PermissionError(f"no access to {url}")

    monkeypatch.setattr(store.fsspec.core, "url_to_fs", refused)
    with pytest.raises(store.StoreError, match=r"^https://\*\*\*@host/x.*credentials") as caught:
        store.read("https://user:pw@host/x?token=pw")
    assert "pw" not in str(caught.value)


def test_object_names_must_stay_in_the_directory(memory, monkeypatch):
    fs, path = store.filesystem(memory)
    names = ["a/b", "../c", "a/../../d", "a//e", "./f", ".g"]
    monkeypatch.setattr(fs, "find", lambda *a, **k: {f"{path}/{n}": {"type": "file", "size": 1} for n in names})
    assert store.sizes(memory).keys() == {"a/b", ".g"}


def test_failing_store_is_retried_and_named(memory, monkeypatch):
    fs, _ = store.filesystem(f"{memory}/x")
    calls = []

    def fails(path, content):
        calls.append(path)
        if len(calls) < successful_call:
            raise ConnectionResetError("connection lost")
        return type(fs).pipe_file(fs, path, content)

    monkeypatch.setattr(fs, "pipe_file", fails)
    monkeypatch.setattr(store, "RETRY_SECONDS", (0.0, 0.0))
    successful_call = 3
    store.write(f"{memory}/x", b"1")
    assert store.read(f"{memory}/x") == b"1"
    calls.clear()
    successful_call = 4
    with pytest.raises(store.StoreError, match=r"/x cannot .*\(ConnectionResetError: "):
        store.write(f"{memory}/x", b"1")
    assert len(calls) == 3


@pytest.mark.slow
def test_unreachable_server_is_named(server, monkeypatch):
    """No server listens on the port; gcsfs retries for half a minute."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value.replace(str(server.port), str(object_servers.free_port())))
    object_servers.clear()
    begin = time.monotonic()
    with pytest.raises(store.StoreError, match=r"/x cannot .*STORAGE_EMULATOR_HOST"):
        store.write(f"{server.url}/x", b"")
    assert time.monotonic() - begin < 120
