"""Measure the loss of a run's newest checkpoint: `seqjax evaluate --workdir=DIR`.

With --entropy it also reports the entropy of the attention weights, E_i = lse_i - sum_j p_ij s_ij in nats, and the
relative entropy E_i / ln(i + 1). Both are means over layers, heads, positions i >= 1 and sequences (arXiv 2505.18522,
section 3).
"""

import sys
from pathlib import Path
from typing import Any

import jax

from seqjax import store
from seqjax.command_line import command_parser, words
from seqjax.data import open_corpus, open_test_sets
from seqjax.errors import UserError
from seqjax.escape import line
from seqjax.files import as_json, write_json
from seqjax.models.entropy import require_entropy
from seqjax.terminal import tell
from seqjax.training import workdir as workdirs
from seqjax.training.evaluate import Evaluation, restore


def main(argv: list[str]) -> None:
    """Print the table and write `evaluation.json` to the workdir.

    With --data the file is `test_sets.json`.
    """
    parser = command_parser("evaluate", description=__doc__)
    workdirs.add_arguments(parser)
    parser.add_argument("--tokens", default=0, type=int, help="maximum tokens per domain; 0 = as in the run's config")
    parser.add_argument(
        "--data",
        default=(),
        type=words,
        metavar="DIR[,DIR]",
        help="directories of prepared blocks to evaluate instead of the run's data and test sets",
    )
    parser.add_argument(
        "--entropy", action="store_true", help="also measure the attention entropy, by default on 1M tokens"
    )
    args = parser.parse_args(argv)
    if args.tokens < 0:
        raise UserError(f"--tokens must be at least 0, not {args.tokens}.")
    config, model, params, step, mesh = restore(args.workdir, allow_code=args.allow_code)
    sizes = {"seq_len": config.train.seq_len, "vocab_size": config.model.vocab_size}
    if args.data:
        args.data = [str(store.location(directory)) for directory in args.data]
        for directory in args.data:
            if not store.url_of(directory) and not Path(directory).is_dir():
                raise UserError(f"--data: there is no directory {directory}; give one of prepared blocks.")
        corpus = open_test_sets(config.data, args.data, **sizes)
    else:
        recorded = workdirs.recorded_manifest(args.workdir)
        corpus = open_corpus(config.data, test_sets=config.eval.path, recorded=recorded, **sizes)
        if recorded and corpus.manifest_hash != recorded:
            sys.stderr.write(
                f"The data differs from the run's data (manifest {corpus.manifest_hash[:16]}, in training "
                f"{recorded[:16]}): these losses do not compare with the run's losses.\n"
            )
    result: dict[str, Any] = {"step": step, "manifest": corpus.manifest_hash}
    if args.entropy:
        require_entropy(model)
    with jax.set_mesh(mesh):
        evaluation = Evaluation(model, corpus, config, mesh=mesh, tokens=args.tokens)
        losses, row = evaluation.measure(params)
        for field in ("loss", "bits_per_byte"):
            result[field] = {name: row.get(f"eval/{name}/{field}") for name in losses}
        result["mean"] = {
            key.removeprefix("eval_mean/"): value for key, value in row.items() if key.startswith("eval_mean/")
        }
        if args.entropy:
            result |= evaluation.entropy(params)
    tell(f"{args.workdir}, step {step}, nats per token, data {corpus.manifest_hash[:16]}")
    for name, loss in result["loss"].items():
        side = corpus.side(name)
        entropy = f"  entropy {result['entropy'][name]:.4f}" if args.entropy else ""
        entropy += f", {result['entropy_relative'][name]:.4f} of ln(i + 1)" if args.entropy else ""
        per_byte = result["bits_per_byte"][name]  # None for a tokenizer that cannot count bytes
        bits = "" if per_byte is None else f"{per_byte:7.4f} bits per byte"
        tell(f"  {line(name):16s} {loss:8.4f}  {bits}  {side:13s}{entropy}".rstrip())
    for name, loss in result["mean"].items():
        side, kind = name.split("/")
        weighting = "domains count equally" if kind == "equal" else "domains count by their tokens"
        tell(f"  {'mean':16s} {loss:8.4f}  {side.replace('_', ' ')}, {weighting}")
    name = "test_sets.json" if args.data else "evaluation.json"
    try:
        if url := store.url_of(args.workdir):
            store.write(f"{url}/{name}", as_json(result))
        else:
            write_json(Path(args.workdir) / name, result)
    except OSError as error:  # the workdir may be read-only
        sys.stderr.write(f"{args.workdir}/{name} was not written ({error.strerror}).\n")
    except store.StoreError as error:
        sys.stderr.write(f"{args.workdir}/{name} was not written: {error}\n")
