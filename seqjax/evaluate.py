"""Loss per domain. `python -m seqjax.evaluate --workdir=DIR` does it for the newest checkpoint of a run.

With --entropy also how widely attention spreads its weights: E_i = lse_i - sum_j p_ij s_ij in nats, and
E_i / ln(i + 1), means over layers, heads, positions i >= 1 and sequences (arXiv 2505.18522, section 3).
"""

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
from seqjax.models import Model
from seqjax.models.entropy import require_entropy
from seqjax.sharding import batch_sharding, make_mesh, replicated, shardings
from seqjax.step import make_entropy_step, make_eval_step
from seqjax.types import Params

ENTROPY_TOKENS = 1_048_576  # per domain, where neither the config nor --tokens says how many


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
    sums = {name: _sums(eval_step, params, domain, mesh) for name, domain in domains.items()}
    return {name: float(total / count) for name, (total, count) in sums.items()}


def measure_entropy(
    model: Model, params: Params, corpus: Corpus, config: Config, *, mesh: Mesh, tokens: int = 0
) -> dict[str, dict[str, float]]:
    """{"entropy": nats per domain, "entropy_relative": share of ln(i + 1)}; `UserError` where no layer has one."""
    domains = load_domains(corpus, config, mesh=mesh, tokens=tokens or config.eval.entropy_tokens or ENTROPY_TOKENS)
    step = jax.jit(make_entropy_step(model), out_shardings=replicated(mesh))
    sums = {name: _sums(step, params, domain, mesh) for name, domain in domains.items()}
    return {
        field: {name: float(total[i] / total[2]) for name, total in sums.items()}
        for i, field in enumerate(("entropy", "entropy_relative"))
    }


def _sums(step: Callable[..., Any], params: Params, domain: Domain, mesh: Mesh) -> np.ndarray:
    """What `step` returns, added up over the batches of a domain in float64."""
    sharding = batch_sharding(mesh)
    batches = zip(domain.tokens, domain.weights, strict=True)
    sums = [step(params, *jax.device_put(batch, sharding)) for batch in batches]
    return np.asarray(jax.device_get(sums), np.float64).sum(axis=0)


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
    parser.add_argument("--entropy", action="store_true", help="also the entropy of attention, on 1M tokens by default")
    args = parser.parse_args(argv)
    config, model, params, step, mesh = restore(args.workdir)
    corpus = open_corpus(config.data, seq_len=config.train.seq_len, vocab_size=config.model.vocab_size)
    result: dict[str, Any] = {"step": step}
    if args.entropy:
        require_entropy(model)
    with jax.set_mesh(mesh):
        domains = load_domains(corpus, config, mesh=mesh, tokens=args.tokens)
        result["loss"] = evaluate(jax.jit(make_eval_step(model)), params, domains, mesh=mesh)
        if args.entropy:
            result |= measure_entropy(model, params, corpus, config, mesh=mesh, tokens=args.tokens)
    sys.stdout.write(f"{args.workdir}, step {step}, nats per token\n")
    for name, loss in result["loss"].items():
        side = "in domain" if name in corpus.in_domain else "out of domain"
        spread = f"  entropy {result['entropy'][name]:.4f}" if args.entropy else ""
        spread += f", {result['entropy_relative'][name]:.4f} of ln(i + 1)" if args.entropy else ""
        sys.stdout.write(f"  {name:16s} {loss:8.4f}  {side:13s}{spread}".rstrip() + "\n")
    workdirs.write_json(args.workdir / "evaluation.json", result)


if __name__ == "__main__":
    run_command(main)
