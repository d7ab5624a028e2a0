"""Loss per domain. `python -m seqjax.evaluate --workdir=DIR` does it for the newest checkpoint of a run."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from seqjax import workdir as workdirs
from seqjax.checkpoint import Checkpoints
from seqjax.config import Config
from seqjax.data import Corpus, open_corpus
from seqjax.errors import UserError, run_command
from seqjax.model import Model
from seqjax.sharding import batch_sharding, make_mesh, shardings
from seqjax.step import make_eval_step
from seqjax.types import Params


class Domain(NamedTuple):
    """One domain's evaluation batches, on the host."""

    tokens: list[np.ndarray]
    weights: list[np.ndarray]


def load_domains(corpus: Corpus, config: Config, *, mesh: Mesh, tokens: int = 0) -> dict[str, Domain]:
    """Every evaluation domain's batches, in the corpus's order (in-domain first); the same ones every time."""
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    micro_batch = config.train.batch_size // config.train.accumulate
    # A batch is split over the devices, so it must be a multiple of them.
    batch_size = -(-(config.eval.batch_size or micro_batch) // shards) * shards
    domains = {}
    for name in corpus.eval_domains:
        batches = list(corpus.eval_batches(name, batch_size=batch_size, max_tokens=tokens or config.eval.tokens))
        domains[name] = Domain([b["tokens"] for b in batches], [b["weights"] for b in batches])
    return domains


def evaluate(
    eval_step: Callable[..., Any], params: Params, domains: Mapping[str, Domain], *, mesh: Mesh
) -> dict[str, float]:
    """Mean next-token loss in nats of every domain."""
    sharding = batch_sharding(mesh)
    losses = {}
    for name, domain in domains.items():
        sums = [
            eval_step(params, *jax.device_put((tokens, weights), sharding))
            for tokens, weights in zip(domain.tokens, domain.weights, strict=True)
        ]
        totals = np.asarray(jax.device_get(sums), np.float64).sum(axis=0)
        losses[name] = float(totals[0] / totals[1])
    return losses


def restore(workdir: Path) -> tuple[Config, Model, Params, int, Mesh]:
    """Config, model, parameters and step of a run's newest checkpoint, on the devices at hand."""
    config = workdirs.load_config(workdir)
    try:
        mesh = make_mesh(**dataclasses.asdict(config.mesh))
    except UserError:
        mesh = make_mesh()  # trained on a pod, looked at on a laptop
    model = Model(config.model, max_len=config.train.seq_len)
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        model.shapes,
        shardings(mesh, model.shapes, model.axes),
    )
    checkpoints = Checkpoints(workdir, read_only=True)
    params, step = checkpoints.restore_params(target)
    checkpoints.close()
    return config, model, params, step, mesh


def main(argv: list[str]) -> None:
    """Print the table and write `evaluation.json` into the workdir."""
    logging.set_verbosity(logging.ERROR)  # Orbax warns that it only reads, which is the point
    parser = argparse.ArgumentParser(prog="python -m seqjax.evaluate", description=__doc__)
    parser.add_argument("--workdir", required=True, type=Path, help="the directory of a run")
    parser.add_argument("--tokens", default=0, type=int, help="per domain at most; 0 = as in the run's config")
    args = parser.parse_args(argv)
    config, model, params, step, mesh = restore(args.workdir)
    corpus = open_corpus(config.data, seq_len=config.train.seq_len, vocab_size=config.model.vocab_size)
    with jax.set_mesh(mesh):
        domains = load_domains(corpus, config, mesh=mesh, tokens=args.tokens)
        losses = evaluate(jax.jit(make_eval_step(model)), params, domains, mesh=mesh)
    sys.stdout.write(f"{args.workdir}, step {step}, nats per token\n")
    for name, loss in losses.items():
        side = "in domain" if name in corpus.in_domain else "out of domain"
        sys.stdout.write(f"  {name:16s} {loss:8.4f}  {side}\n")
    workdirs.write_json(args.workdir / "evaluation.json", {"step": step, "loss": losses})


if __name__ == "__main__":
    run_command(main)
