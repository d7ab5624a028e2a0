"""Convert text shards to ArrayRecord files of token blocks, with a manifest.

    seqjax prepare --source=DIR_OR_GLOB --out=DIR --tokenizer=mixtral|byte|huggingface|FILE [--seq_len=2048]

Every document becomes BOS + tokens + EOS. The documents of a domain and split are concatenated in shard order and cut
into blocks of seq_len + 1 tokens, without overlap. The manifest counts the remaining tokens as `tokens_unused`.

    documents.npz  document lengths, used to spread an evaluation and estimate its uncertainty (document_index.py)
    sources.npz    document sources, if known (document_sources.py)
    tokenizer.npz  bytes per id, so training does not need the tokenizer's package (stored_tokenizer.py)

A run that stopped, was killed or filled the disk resumes when the command is repeated, with the same bytes as an
uninterrupted run. Finished shards stay in OUT/.parts until all are done. OUT therefore needs 4 bytes per token at first
and 2 at the end (8 and 4 for vocabularies over 65,536 ids). Bad lines are skipped, counted and listed in the manifest;
`--strict` stops at the first one.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from seqjax import store
from seqjax.data import (
    blocks,
    document_index,
    document_sources,
    hold_out,
    manifests,
    shards,
    slimpajama,
    stored_tokenizer,
)
from seqjax.data.layout import SLIMPAJAMA, Layout, clean
from seqjax.data.prepare import executors, progress
from seqjax.data.prepare.cluster import Needs
from seqjax.data.prepare.lock import FILE as LOCK
from seqjax.data.prepare.lock import locked
from seqjax.data.prepare.pack import FileJob, in_two_splits, is_written, lacks_a_split, plan_files, portions, write_file
from seqjax.data.prepare.reports import read_report, read_settings, require_documents
from seqjax.data.prepare.results import document_lengths, make_manifest, source_indices
from seqjax.data.prepare.tokenize import ShardJob, TextJob, compare_text, is_done, require_few, tokenize_shard
from seqjax.data.tokenizer import Tokenizer, id_dtype, load_tokenizer
from seqjax.errors import UserError, nearest
from seqjax.files import TEMPORARY, remove_temporaries, write_json
from seqjax.terminal import StatusLine

Job = TypeVar("Job")

# Default share of held-out documents, if the source has no validation split and the layout is not SlimPajama's.
VALIDATION = hold_out.SHARE
# A manifest contains these settings only if they differ from the defaults.
OPTIONAL = ("layout", "validation", "dtype")


def prepare(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str,
    tokenizer_path: str | Path = "",
    seq_len: int = 2048,
    workers: int = 0,
    executor: str = executors.LOCAL,
    domains: Sequence[str] = (),
    layout: Layout = SLIMPAJAMA,
    validation: float | None = None,
    min_tokens: int = 0,
    max_tokens: int = 0,
    strict: bool = False,
    verify: bool = False,
) -> dict[str, Any]:
    """Create or complete the blocks of `source` in `out`, and return the manifest.

    Args:
        source: Directory or glob of shards, anything that fsspec can open.
        out: Local directory.
        tokenizer: byte | mixtral | huggingface.
        tokenizer_path: mixtral: a sentencepiece file that replaces mistral-common's; huggingface: a public model's
            directory.
        seq_len: T; blocks hold T + 1 tokens.
        workers: Number of processes; 0 = one per core, 1 = only this process.
        executor: local, or dask:ADDRESS for a running Dask cluster (the extra `dask`). Its workers must share the
            storage of `source` and `out`.
        domains: Domains to keep; empty = all.
        layout: The location of text and domain in a document; SlimPajama's by default.
        validation: Share of documents to hold out by their text hash; requires a source without a validation split.
            None = 0.01 without such a split, but 0 in SlimPajama's layout.
        min_tokens: Documents with fewer tokens are left out.
        max_tokens: Documents are truncated to this length; 0 = not truncated.
        strict: Stop at the first bad line.
        verify: Compare all finished text and blocks with their hashes. Otherwise only text that changed later is
            compared.

    Raises:
        UserError: An argument is invalid, nothing was read, a requested domain is absent or cannot be divided as
            `validation` says, `out` holds other data, its text has changed, a line is bad (if strict), the disk is
            full, or the cluster fails.
    """
    source, out = store.location(source), store.local(out, "--out")
    if seq_len < 1:
        raise UserError(f"--seq_len must be at least 1, not {seq_len}.")
    for name, value in (("workers", workers), ("min_tokens", min_tokens), ("max_tokens", max_tokens)):
        if value < 0:
            raise UserError(f"--{name} must be at least 0, not {value}.")
    executors.require(executor, workers=workers)
    vocabulary = load_tokenizer(tokenizer, tokenizer_path)
    dtype = id_dtype(vocabulary.vocab_size)
    source_shards = shards.find_shards(str(source), layout=layout, on_message=StatusLine().say)
    if set(of_split := Counter(shard.split for shard in source_shards)) != {"train"}:
        StatusLine().say(f"Files by split: {', '.join(f'{n} {split}' for split, n in of_split.items())}.")
    for kind in {type(shard) for shard in source_shards}:
        kind.require()
    if layout.is_slimpajama:  # The user may omit the domain, and a dataset may name it.
        layout = dataclasses.replace(source_shards[0].layout, text_field=layout.text_field)
    selected_domains = _selected_domains(domains, layout)
    is_explicit, validation = validation is not None, _validation(validation, layout, source_shards)
    # Workers on other machines have different current directories.
    out, tokenizer_path = out.absolute(), str(Path(tokenizer_path).absolute()) if tokenizer_path else ""
    settings = {
        "block": seq_len + 1,
        "domains": list(selected_domains),
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "sources": [{"name": shard.name, "split": shard.split, "size": shard.size} for shard in source_shards],
        "tokenizer": {
            "name": vocabulary.name,
            "sha256": vocabulary.hash,
            "vocab_size": vocabulary.vocab_size,
            "bos": vocabulary.bos,
            "eos": vocabulary.eos,
        },
    }
    if layout != SLIMPAJAMA:
        settings["layout"] = dataclasses.asdict(layout)
    if validation:
        settings["validation"] = validation
    if dtype != blocks.DTYPE:
        settings["dtype"] = dtype.name
    workers = workers or os.cpu_count() or 1
    parts = out / ".parts"
    with contextlib.ExitStack() as stack:
        # A finished preparation is only read, and may be on a disk that cannot be written.
        if not (out / "manifest.json").is_file():
            stack.enter_context(locked(out))
        is_new = _begin(out, parts, settings)
        jobs = [
            ShardJob(
                shard=shard,
                part=parts / f"{index:06d}",
                tokenizer=tokenizer,
                tokenizer_path=tokenizer_path,
                domains=selected_domains,
                layout=layout,
                hold_out=validation > 0 and shard.split == "train",
                several_splits=any(other_shard.split != "train" for other_shard in source_shards),
                min_tokens=min_tokens,
                max_tokens=max_tokens,
                strict=strict,
            )
            for index, shard in enumerate(source_shards)
        ]
        needs = Needs(
            parts=parts,
            shards=source_shards,
            tokenizer=tokenizer,
            tokenizer_path=tokenizer_path,
            tokenizer_sha256=vocabulary.hash,
        )
        if (out / "manifest.json").is_file():
            return _finished(out, jobs, vocabulary, executor=executor, workers=workers, needs=needs, verify=verify)
        try:
            pool = stack.enter_context(executors.opened(executor, workers=workers, needs=needs))
        except UserError:
            if is_new:
                _abandon(out, parts)
            raise
        finished = _without(jobs, lambda job: not is_done(job), workers=workers)
        _compare_texts(pool, _text_jobs(finished, out, workers=workers, verify=verify))
        reports = _tokenise(pool, jobs, finished)
        if strict and (bad := [line for report in reports for line in report["skipped"]["first"]]):
            first = bad[0]  # an earlier run without --strict finished this shard
            where = f"{first['file']}:{first['line']}"
            raise UserError(f"{where}: {first['reason']}. Fix the file and give another --out.")
        try:
            require_few({domain for report in reports for domain in report["domains"]})
            require_documents(
                reports, source=str(source), layout=layout, domains=domains, min_tokens=min_tokens, block=seq_len + 1
            )
        except UserError:
            _abandon(out, parts)  # allows a new command with other settings
            raise
        held, names = portions(jobs, reports, validation=validation, block=seq_len + 1)
        if is_explicit and (problem := lacks_a_split(held, validation=validation, block=seq_len + 1)):
            _abandon(out, parts)
            raise UserError(problem)
        plan = plan_files(out, parts, held, block=seq_len + 1, dtype=dtype)
        _write(pool, [job for _, _, job in plan], out=out, workers=workers)
        _compare_texts(pool, _text_jobs(jobs, out, workers=workers, slack=0))
        remove_temporaries(out)
        document_index.write(out / document_index.FILE, document_lengths(held))
        if names:
            document_sources.write(out / document_sources.FILE, source_indices(held, names), names)
        stored_tokenizer.write(out / stored_tokenizer.FILE, vocabulary)
        manifest = make_manifest(settings, reports, held, plan, out)
        if twice := in_two_splits(jobs):
            manifest["in_two_splits"] = twice
        write_json(out / "manifest.json", manifest, sort_keys=True)
        _remove(parts)
        return manifest


def _finished(
    out: Path,
    jobs: Sequence[ShardJob],
    vocabulary: Tokenizer,
    *,
    executor: str,
    workers: int,
    needs: Needs,
    verify: bool,
) -> dict[str, Any]:
    """Return the manifest of a finished preparation.

    Raises `UserError` if its text or blocks have changed.
    """
    manifest = manifests.read_manifest(out)
    if not stored_tokenizer.is_intact(out / stored_tokenizer.FILE, vocabulary):
        stored_tokenizer.write(out / stored_tokenizer.FILE, vocabulary)
    blocks.open_records(out, manifest, vocab_size=vocabulary.vocab_size)  # checks what a run reads
    document_index.read(out / document_index.FILE)
    document_sources.read(out / document_sources.FILE)
    if hashes := manifest.get("text_sha256"):
        texts = _text_jobs(jobs, out, workers=workers, verify=verify, hashes=hashes)
    else:
        texts = []
        StatusLine().say(f"{out}: an earlier version prepared it without text hashes, so its text was not compared.")
    if texts:
        needs.parts.mkdir(exist_ok=True)
        with executors.opened(executor, workers=workers, needs=needs) as pool:
            _compare_texts(pool, texts)
    if verify:
        manifests.compare_all(out, manifest)
    _remove(needs.parts)
    return manifest


CLOCK_SECONDS = 60.0  # allowed difference between a store's clock and this machine's clock


def _text_jobs(
    jobs: Sequence[ShardJob],
    out: Path,
    *,
    workers: int,
    verify: bool = False,
    hashes: Sequence[str] = (),
    slack: float = CLOCK_SECONDS,
) -> list[TextJob]:
    """Return the comparisons for text that may have changed after it was read.

    With `verify`, all text is compared. `hashes` come from a finished preparation's manifest; otherwise the part
    reports hold them. `slack` allows for clock differences. If it is 0, text without a modification time is not
    compared.
    """

    def job_of(index: int) -> TextJob | None:
        job = jobs[index]
        done = out / "manifest.json" if hashes else job.done
        changed = job.shard.changed()
        is_older = slack == 0 if changed is None else changed < done.stat().st_mtime - slack
        if is_older and not verify:
            return None
        sha256 = hashes[index] if hashes else (read_report(job.done) or {}).get("text_sha256", "")
        return TextJob(job, sha256, out, done)

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return [text for text in pool.map(job_of, range(len(jobs))) if text is not None]


def _compare_texts(pool: executors.Executor, texts: Sequence[TextJob]) -> None:
    """Raise `UserError` if a text differs from the tokenised text."""
    _run(pool, compare_text, texts, title="compare", total=sum(text.job.shard.size for text in texts))


def _tokenise(pool: executors.Executor, jobs: Sequence[ShardJob], finished: Sequence[ShardJob]) -> list[dict[str, Any]]:
    """Make the unfinished parts, and return all reports."""
    done = {job.done for job in finished}
    pending = [job for job in jobs if job.done not in done]
    damaged = [job.part.name for job in pending if job.done.is_file()]
    if damaged:
        StatusLine().say(f"{len(damaged)} finished parts are damaged and are made again: {damaged[0]} ...")
    size = sum(job.shard.size for job in pending)
    _run(pool, tokenize_shard, pending, title="tokenise", total=size)
    return [read_report(job.done) or {} for job in jobs]


def _write(pool: executors.Executor, files: Sequence[FileJob], *, out: Path, workers: int) -> None:
    """Write the missing block files."""
    pending = _without(files, is_written, workers=workers)
    n_tokens = sum(tokens for job in pending for _, _, tokens in job.segments)
    if pending:
        _require_space(out, pending[0].dtype.itemsize * n_tokens)
    _run(pool, write_file, pending, title="write", total=n_tokens)


def _run(
    pool: executors.Executor, function: Callable[[Any], None], jobs: Sequence[Any], *, title: str, total: int
) -> None:
    """Run all jobs and show their progress."""
    if jobs:
        counters = progress.Progress()
        with progress.Display(counters, title=title, total=total, jobs=len(jobs)) as display:
            pool.run(function, jobs, display)


def _without(jobs: Sequence[Job], is_done: Callable[[Job], bool], *, workers: int) -> list[Job]:
    """Return the unfinished jobs; this reads the files of earlier jobs."""
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return [job for job, done in zip(jobs, pool.map(is_done, jobs), strict=True) if not done]


def _selected_domains(domains: Sequence[str], layout: Layout) -> tuple[str, ...]:
    """Return the domains to keep, or empty for all.

    Raises `UserError` for an invalid name.
    """
    for domain in domains:
        if layout.is_slimpajama and domain not in slimpajama.NAMES:
            raise UserError(f"--domains: {domain!r} is not known.{nearest(domain, slimpajama.NAMES)}")
        if clean(domain) != domain:
            raise UserError(f"--domains: {domain!r} is not a domain name; write {clean(domain)!r}.")
    if layout.is_slimpajama:
        return tuple(d for d in slimpajama.NAMES if d in domains or not domains)
    return tuple(sorted(domains))


def _validation(share: float | None, layout: Layout, source_shards: Sequence[shards.Shard]) -> float:
    """Return the share of documents to hold out.

    Raises `UserError` if the requested share is invalid or not possible.
    """
    named = next((shard.name for shard in source_shards if shard.split == "validation"), "")
    if share is None:
        return 0.0 if layout.is_slimpajama or named else VALIDATION
    if not 0 <= share < 1:
        raise UserError(f"--validation must be at least 0 and less than 1, not {share}.")
    if share and named:
        raise UserError(f"--validation: {named} is the validation split of the source; leave the option out.")
    return share


# The files that a preparation writes to its parts directory.
OWN = re.compile(
    r"settings\.json|cluster-[0-9a-f]{32}\.json"
    r"|\d{6}(\.bin|\.npz|\.sources\.npz|\.texts|\.json)"
    r"|(train|validation|test)-.+-\d{5}\.json"
)


def _is_foreign(path: Path) -> bool:
    return not (OWN.fullmatch(path.name) or TEMPORARY.fullmatch(path.name)) or path.is_dir()


def _remove(parts: Path) -> None:
    """Remove a preparation's files from its parts directory.

    The directory is also removed if it is then empty.
    """
    for path in () if parts.is_symlink() else parts.glob("*"):
        if not _is_foreign(path):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        parts.rmdir()


def _abandon(out: Path, parts: Path) -> None:
    """Remove the files made so far, and `out` if it is then empty."""
    _remove(parts)
    with contextlib.suppress(OSError):
        out.rmdir()


def _begin(out: Path, parts: Path, settings: dict[str, Any]) -> bool:
    """Start in an empty directory, or resume with the same settings.

    Returns whether the directory is new. Raises `UserError` for foreign files or changed settings.
    """
    before, manifest = (read_settings(path) for path in (parts / "settings.json", out / "manifest.json"))
    if before is None and manifest is not None:
        before = {key: manifest[key] for key in (*settings, *OPTIONAL) if key in manifest}
    if before is None:
        if out.is_dir() and any(path.name not in (".parts", LOCK) for path in out.iterdir()):
            raise UserError(f"{out} is not empty and has no valid manifest.json of a preparation; give another --out.")
        if parts.is_symlink() or any(_is_foreign(path) for path in parts.glob("*")):
            raise UserError(f"{parts} has files that no preparation wrote, or is a link; give another --out.")
        try:
            _remove(parts)  # without settings.json, the settings of these parts are unknown
            parts.mkdir(parents=True, exist_ok=True)
            write_json(parts / "settings.json", settings)
        except OSError as error:
            raise UserError(f"Cannot write to {out}: {error.strerror}; give another --out.") from error
        return True
    keys = [*settings, *(key for key in OPTIONAL if key in before and key not in settings)]
    changed = [
        _difference(key, before.get(key), settings.get(key)) for key in keys if before.get(key) != settings.get(key)
    ]
    if changed:
        raise UserError(
            f"{out} was begun with other settings: {'; '.join(changed)}. Give them again, or another --out, "
            "or delete the directory."
        )
    return False


def _difference(key: str, old: Any, new: Any) -> str:
    if key == "sources" and isinstance(old, list):
        names = [{(entry["split"], entry["name"]): entry["size"] for entry in side} for side in (old, new)]
        either = sorted(names[0].keys() | names[1].keys())
        changed = [key[1] for key in either if names[0].get(key) != names[1].get(key)]
        return f"{len(changed)} source files are new, gone or of another size ({', '.join(changed[:3])})"
    if key == "tokenizer" and isinstance(old, dict):
        return f"tokenizer {old['name']} ({old['sha256'][:12]}) -> {new['name']} ({new['sha256'][:12]})"
    return f"{key} {old!r} -> {new!r}"


def _require_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out).free
    if needed > free:
        raise UserError(
            f"The blocks need {needed / 1e9:.1f} GB in {out}, {free / 1e9:.1f} GB are free. All shards are "
            "tokenised and kept: free some disk space and run the same command again."
        )
