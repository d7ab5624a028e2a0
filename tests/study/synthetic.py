"""Write runs with known gaps, as training writes them, and study files."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.training import eval_losses

DOMAINS = ("arxiv", "github")
SHARES = (0.7, 0.3)
# Documents with one, two or three blocks, in two training domains and two OOD domains.
DOCUMENTS = {name: np.repeat(np.arange(12), np.resize([1, 2, 3], 12)) for name in ("commoncrawl", "c4", *DOMAINS)}


def write_run(
    directory: Path,
    in_domain: Sequence[float],
    *,
    offset: Mapping[str, float] | float = 0.0,
    slope: float = 1.0,
    noise: int | None = None,
    blocks: bool = True,
    manifest: str = "m",
    tokenizer: str = "byte",
    steps: Sequence[int] | None = None,
) -> Path:
    """Write a run with OOD loss = slope * in-domain loss + 1 + offset.

    Block losses spread around this mean, equally in all runs; `noise` seeds an additional spread. `steps` are the
    evaluation steps, by default 0, 1, ...
    """
    directory.mkdir(parents=True)
    rng = np.random.default_rng(noise)
    lines = []
    block_fields = {f"{name}/documents": d for name, d in DOCUMENTS.items()}
    block_fields |= {
        f"{name}/{field}": np.arange(len(d)) for name, d in DOCUMENTS.items() for field in ("index", "n_bytes")
    }
    noise_by_domain = {name: rng.normal(size=12)[d] * 0.05 * (noise is not None) for name, d in DOCUMENTS.items()}
    for step, loss in zip(steps or range(len(in_domain)), in_domain, strict=True):
        losses = {}
        for name, documents in DOCUMENTS.items():
            domain_offset = offset if isinstance(offset, float | int) else offset[name] if name in DOMAINS else 0.0
            mean = slope * loss + 1 + domain_offset if name in DOMAINS else loss
            spread = np.linspace(-1, 1, len(documents)) + noise_by_domain[name] - noise_by_domain[name].mean()
            losses[name] = (mean + spread).astype(np.float32)
        means = {name: float(block_losses.astype(float).mean()) for name, block_losses in losses.items()}
        row: dict[str, Any] = {"step": step, "tokens": 100 * step, "train/loss": loss - 0.2}
        row |= {f"eval/{name}/loss": mean for name, mean in means.items()}
        row |= {f"eval/{name}/bits_per_byte": mean / 4 for name, mean in means.items()}
        outside = [means[name] for name in DOMAINS]
        row["eval_mean/out_of_domain/equal"] = float(np.mean(outside))
        row["eval_mean/out_of_domain/natural"] = float(np.dot(outside, SHARES))
        lines += [{"step": step, "train/loss": 9.0, "seconds": 1.0, "tokens_per_s": 5.0, "tokens": 100 * step}, row]
        if blocks:
            (directory / eval_losses.DIRECTORY).mkdir(exist_ok=True)
            eval_losses.write(directory, step, losses)
    if blocks:
        np.savez(directory / eval_losses.DIRECTORY / "blocks.npz", allow_pickle=False, **block_fields)
    (directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (directory / "config.json").write_text(json.dumps({"data": {"tokenizer": tokenizer}}))
    (directory / "run.json").write_text(json.dumps({"manifest": manifest, "versions": {"jax": "0"}, "device": "cpu"}))
    return directory


def write_trunk(
    directory: Path,
    in_domain: Mapping[float, float],
    outside: Callable[[str, float], float],
    *,
    steps: int = 1000,
    noise: int | None = None,
    manifest: str = "m",
) -> Path:
    """Write a run with ends.

    `in_domain` maps the share of the steps to the loss, and `outside` gives a domain's OOD loss. The trunk also has an
    evaluation at the undecayed learning rate, which no comparison may use.
    """
    for share, loss in in_domain.items():
        step = round(share * steps)
        offset = {name: outside(name, loss) - loss - 1 for name in DOMAINS}
        end = directory / "ends" / str(step)
        write_run(end, [loss], offset=offset, noise=noise, manifest=manifest, steps=[step])
    row = {"step": steps, "train/loss": 9.0, "seconds": 1.0, "tokens_per_s": 4.0, "tokens": 100 * steps}
    evaluation = {f"eval/{name}/loss": 9.0 for name in DOCUMENTS} | {"train/loss": 9.0, "step": 1, "tokens": 100}
    (directory / "metrics.jsonl").write_text(f"{json.dumps(evaluation)}\n{json.dumps(row)}\n")
    config = {"data": {"tokenizer": "byte"}, "train": {"steps": steps, "ends": list(in_domain)}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "run.json").write_text(json.dumps({"manifest": manifest, "versions": {"jax": "0"}, "device": "cpu"}))
    return directory


def write_study(path: Path, runs: Mapping[str, Path | dict[str, Any]], **fields: Any) -> Path:
    """Write a study file; `runs` maps label -> workdir or run fields."""
    entries = {label: {"workdir": str(run)} if isinstance(run, Path) else run for label, run in runs.items()}
    values = {
        "title": "t",
        "references": ("slow",),
        "domains": DOMAINS,
        "against": ("commoncrawl", "c4"),
        "runs": entries,
    }
    path.write_text(f"def get_study():\n    return {values | fields!r}\n")
    return path
