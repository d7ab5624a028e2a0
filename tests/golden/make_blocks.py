"""Makes blocks.zip: what `python -m seqjax.data.prepare` wrote of a few kilobytes of invented text, 136 tokens a block.

    python -m tests.golden.make_blocks

The archive is what counts, not this script: checkpoints in workdirs/ and losses.json belong to these very blocks, so
making them anew (another zstandard or array_record is enough to change bytes) asks for making those anew too. Every
domain has its own words. In validation arXiv has a single block, so that most it is evaluated on are training blocks.
"""

import json
import random
import sys
import tempfile
import zipfile
from pathlib import Path

import zstandard

from tests.golden import commands

HERE = Path(__file__).parent
SEQ_LEN = 136
SET_NAMES = {
    "commoncrawl": "RedPajamaCommonCrawl",
    "c4": "RedPajamaC4",
    "github": "RedPajamaGithub",
    "arxiv": "RedPajamaArXiv",
    "book": "RedPajamaBook",
    "wikipedia": "RedPajamaWikipedia",
    "stackexchange": "RedPajamaStackExchange",
}


def document(rng: random.Random, letters: str, n_bytes: int) -> str:
    """A text of short words that come back."""
    words = ["".join(rng.choices(letters, k=rng.randint(2, 5))) for _ in range(9)]
    text = ""
    while len(text) < n_bytes:
        text += rng.choice(words) + " "
    return text[:n_bytes]


def write_source(directory: Path) -> None:
    """Shards in SlimPajama's shape."""
    rng = random.Random(0)
    for split in ("train", "validation"):
        lines = []
        for i, (domain, set_name) in enumerate(SET_NAMES.items()):
            letters = "abcdefghijklmnopqrstuvwxyz"[2 * i : 2 * i + 12]
            blocks = {
                "train": {"commoncrawl": 20, "c4": 12}.get(domain, 4),
                "validation": 1 if domain == "arxiv" else 5,
            }
            for n in range(blocks[split]):
                text = document(rng, letters, SEQ_LEN + 1 + n % 7)
                lines.append(json.dumps({"text": text, "meta": {"redpajama_set_name": set_name}}) + "\n")
        path = directory / split / "part_0.jsonl.zst"
        path.parent.mkdir(parents=True)
        path.write_bytes(zstandard.ZstdCompressor().compress("".join(lines).encode()))


def pack(directory: Path, archive: Path) -> None:
    """A zip archive of the files below `directory`, the same bytes for the same files."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for path in sorted(p for p in directory.rglob("*") if p.is_file()):
            name = zipfile.ZipInfo(str(path.relative_to(directory)))
            name.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(name, path.read_bytes())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        write_source(root / "source")
        flags = [f"--source={root / 'source'}", f"--out={root / 'blocks'}", f"--seq_len={SEQ_LEN}"]
        commands.run_each([["seqjax.data.prepare", *flags, "--tokenizer=byte", "--workers=1"]])
        pack(root / "blocks", HERE / "blocks.zip")
        manifest = json.loads((root / "blocks" / "manifest.json").read_text())
    for split, domains in manifest["splits"].items():
        counts = ", ".join(f"{d} {e['blocks']}" for d, e in domains.items())
        sys.stdout.write(f"{split}: {counts}\n")
