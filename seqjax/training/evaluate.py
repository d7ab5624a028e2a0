"""Measure losses and attention entropy by domain, and restore checkpoints.

The entropy of the attention weights is E_i = lse_i - sum_j p_ij s_ij in nats. The relative entropy is E_i / ln(i + 1),
its share of the maximum. Both are means over layers, heads, positions i >= 1 and sequences (arXiv 2505.18522, section
3).
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from seqjax.config import Config
from seqjax.data import Corpus, EvalBlocks
from seqjax.data.corpora import document_ids
from seqjax.errors import UserError
from seqjax.models import Model
from seqjax.models.entropy import require_entropy
from seqjax.sharding import batch_sharding, make_mesh, replicated, shardings
from seqjax.terminal import StatusLine
from seqjax.training import eval_losses, identity, metrics, mirrors, origin, token_classes
from seqjax.training import workdir as workdirs
from seqjax.training.checkpoint import Checkpoints
from seqjax.training.mirrors import Mirror
from seqjax.training.schedule import Segment, keeps_checkpoint, segments
from seqjax.training.step import eval_batch_size, make_entropy_step
from seqjax.types import Params

ENTROPY_TOKENS = 1_048_576  # per domain, if neither the config nor --tokens sets a number


class Domain(NamedTuple):
    """One domain's evaluation blocks on the host, in batches.

    The last batch is padded.
    """

    blocks: EvalBlocks
    tokens: list[np.ndarray]  # int32 [B, T+1]
    weights: list[np.ndarray]  # float32 [B]; 0 for padding


def load_domains(corpus: Corpus, config: Config, *, mesh: Mesh, tokens: int = 0) -> dict[str, Domain]:
    """Return the batches of all evaluation domains, in-domain first.

    Each call returns the same batches. `tokens` limits the tokens per domain; 0 means `config.eval.tokens`.
    """
    batch_size = eval_batch_size(config.eval.batch_size, config.train, mesh)
    domains = {}
    for name in corpus.eval_domains:
        count = max(1, (tokens or config.eval.tokens) // corpus.seq_len)
        blocks = corpus.eval_blocks(name, count=count, seed=config.eval.seed)
        rows = blocks.tokens.astype(np.int32)
        # Padding repeats a real row: its tokens are then inside the vocabulary.
        padding = -len(rows) % batch_size
        rows = np.concatenate([rows, np.repeat(rows[:1], padding, axis=0)])
        weights = np.repeat(np.array([1, 0], np.float32), [len(rows) - padding, padding])
        n_batches = len(rows) // batch_size
        domains[name] = Domain(blocks, np.split(rows, n_batches), np.split(weights, n_batches))
    return domains


class Evaluation:
    """Evaluates a model on all corpus domains. Call it inside `jax.set_mesh`.

    Each evaluation uses the same `blocks`, kept by domain in corpus order.
    """

    def __init__(
        self,
        model: Model,
        corpus: Corpus,
        config: Config,
        *,
        mesh: Mesh,
        tokens: int = 0,
        rules: int = origin.RULES,
    ):
        """Load the blocks, at most `tokens` per domain (0: `config.eval.tokens`).

        `rules` are the run's rules (seqjax/training/origin.py). Raises `UserError` if the config requests attention
        entropy and no layer has softmax weights.
        """
        if config.eval.entropy_tokens:
            require_entropy(model)
        self._model, self._corpus, self._config, self._mesh, self._tokens = model, corpus, config, mesh, tokens
        self._domains = load_domains(corpus, config, mesh=mesh, tokens=tokens)
        n_bytes_O = corpus.tokenizer.n_bytes
        in_text_O = (n_bytes_O > 0 if rules > 1 else np.ones_like(n_bytes_O)).astype(np.float32)

        def block_losses(params: Params, tokens_BT1: jax.Array) -> tuple[jax.Array, jax.Array]:
            return model.weighted_sequence_losses(params, tokens_BT1, jnp.asarray(in_text_O)[tokens_BT1[:, 1:]])

        self._block_step = jax.jit(block_losses, out_shardings=replicated(mesh))
        self._token_step = jax.jit(model.token_losses, out_shardings=replicated(mesh))
        self.blocks = {name: domain.blocks for name, domain in self._domains.items()}

    def losses(self, params: Params) -> dict[str, np.ndarray]:
        """Return mean block losses in nats per token, "DOMAIN" -> float64 [n]."""
        return self.measure(params)[0]

    def measure(self, params: Params) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Return `losses` and the evaluation's metric row (`summarize`)."""
        sharding = batch_sharding(self._mesh)
        sums = {
            name: [self._block_step(params, jax.device_put(tokens, sharding)) for tokens in domain.tokens]
            for name, domain in self._domains.items()
        }
        losses, in_text = {}, {}
        for name, parts in sums.items():
            losses[name], in_text[name] = (
                np.concatenate(part).astype(np.float64)[: len(self.blocks[name].tokens)] / self._corpus.seq_len
                for part in zip(*jax.device_get(parts), strict=True)
            )
        return losses, summarize(losses, in_text, self.blocks, self._corpus)

    def write_classes(self, workdir: Path, step: int, params: Params) -> None:
        """Write the loss sums by token class after `step`.

        Process 0 writes; all processes must call it.
        """
        sharding, token_losses = batch_sharding(self._mesh), {}
        for name, domain in self._domains.items():  # one at a time, to bound device memory
            parts = [self._token_step(params, jax.device_put(tokens, sharding)) for tokens in domain.tokens]
            token_losses[name] = np.concatenate(jax.device_get(parts))[: len(domain.blocks.tokens)]
        if jax.process_index() == 0:
            token_classes.write_classes(workdir, step, token_losses, self.blocks, self._corpus)

    def entropy(self, params: Params) -> dict[str, dict[str, float]]:
        """Return the attention entropy by domain.

        The result is {"entropy": in nats, "entropy_relative": share of ln(i + 1)}, each by domain. Raises `UserError`
        if no layer has softmax weights.
        """
        tokens = self._tokens or self._config.eval.entropy_tokens or ENTROPY_TOKENS
        domains = load_domains(self._corpus, self._config, mesh=self._mesh, tokens=tokens)
        step = jax.jit(make_entropy_step(self._model), out_shardings=replicated(self._mesh))
        sums = {name: _sum_over_batches(step, params, domain, self._mesh) for name, domain in domains.items()}
        return {
            field: {name: float(total[i] / total[2]) for name, total in sums.items()}
            for i, field in enumerate(("entropy", "entropy_relative"))
        }


def summarize(
    losses: Mapping[str, np.ndarray],
    in_text: Mapping[str, np.ndarray],
    blocks: Mapping[str, EvalBlocks],
    corpus: Corpus,
) -> dict[str, float]:
    """Return the metric row of an evaluation.

    `losses` are mean block losses. `in_text` are the same sums without tokens that have no bytes, such as BOS and EOS,
    but still divided by the block length.

    For each domain the row has the mean `loss` in nats per token. It also has `bits_per_byte` of the text, which is
    comparable across tokenizers. In-domain and out-of-domain means follow, `equal` (unweighted) and `natural` (weighted
    by corpus shares). Test sets are not in these means.
    """
    row = {f"eval/{name}/loss": float(np.mean(loss)) for name, loss in losses.items()}
    for name, loss in in_text.items():
        nats = float(np.sum(loss)) * corpus.seq_len
        if n_bytes := int(np.sum(blocks[name].n_bytes)):
            row[f"eval/{name}/bits_per_byte"] = nats / math.log(2) / n_bytes
    for side, is_in_domain in (("in_domain", True), ("out_of_domain", False)):
        names = [
            name for name in losses if name in corpus.natural_shares and (name in corpus.in_domain) == is_in_domain
        ]
        if names:
            side_losses = [row[f"eval/{name}/loss"] for name in names]
            row[f"eval_mean/{side}/equal"] = float(np.mean(side_losses))
            shares = [corpus.natural_shares[name] for name in names]
            row[f"eval_mean/{side}/natural"] = float(np.average(side_losses, weights=shares))
    return row


def _sum_over_batches(step: Callable[..., Any], params: Params, domain: Domain, mesh: Mesh) -> np.ndarray:
    """Return the float64 sum of `step` results over a domain's batches."""
    sharding = batch_sharding(mesh)
    batches = zip(domain.tokens, domain.weights, strict=True)
    sums = [step(params, *jax.device_put(batch, sharding)) for batch in batches]
    return np.asarray(jax.device_get(sums), np.float64).sum(axis=0)


def is_complete(config: Config, segment: Segment, workdir: str | Path) -> bool:
    """Return whether a cooldown has its evaluation and any checkpoint to keep.

    A damaged evaluation file counts as missing.
    """
    directory = segment.directory(workdir)
    has_checkpoint = not keeps_checkpoint(config, segment) or (directory / "checkpoints" / str(segment.end)).is_dir()
    return has_checkpoint and not eval_losses.fault(eval_losses.path(directory, segment.end))


def repair_evaluation(mirror: Mirror, evaluation: Evaluation, step: int, params: Params) -> None:
    """Repeat the last evaluation of a finished run if its files are lost or damaged.

    The files are the block losses and the token-class file; a missing token-class file is not an error. `params` are
    the parameters after `step`, the last step. All processes must call it, inside `jax.set_mesh`.

    Raises `UserError` if the losses differ from `metrics.jsonl`. Also raises it if the file of an earlier evaluation is
    damaged, because that evaluation cannot be repeated and a study reads it.
    """
    workdir, lead = mirror.directory, jax.process_index() == 0
    path, classes = eval_losses.path(workdir, step), workdir / eval_losses.DIRECTORY / token_classes.CLASSES
    faults = [eval_losses.fault(path), eval_losses.fault(classes) if classes.exists() else ""]
    repeat = np.array([bool(fault) for fault in faults])
    if jax.process_count() > 1:  # All processes must evaluate together.
        with jax.transfer_guard("allow"):
            repeat = multihost_utils.broadcast_one_to_all(repeat)
    if repeat[0]:
        losses, row = evaluation.measure(params)
        rows = metrics.read(workdir) if lead else []
        if lead and not any(row.items() <= recorded.items() for recorded in rows if recorded["step"] == step):
            raise UserError(
                f"{path} {faults[0]}, and the checkpoint of step {step} now gives other losses than "
                f"{mirror}/metrics.jsonl. Put back a copy of the file, or run the same command on the devices that "
                "trained the run to write it again."
            )
        if lead:
            eval_losses.write(workdir, step, losses)
    if repeat[1]:
        evaluation.write_classes(workdir, step, params)
    if lead:
        for file, fault in zip((path, classes), faults, strict=True):
            if fault:
                StatusLine().say(f"{file} {fault.replace('is', 'was', 1)}; it was recomputed from the checkpoint.")
        eval_losses.read(workdir)


def report_missing_files(config: Config, workdir: Path) -> None:
    """Print the missing evaluation files that a finished run cannot recreate."""
    print_line = StatusLine().say
    for directory in dict.fromkeys([workdir, *(segment.directory(workdir) for segment in segments(config))]):
        rows = metrics.read(directory) if (directory / "metrics.jsonl").is_file() else []
        steps = [row["step"] for row in rows if any(key.startswith("eval/") for key in row)]
        for file in eval_losses.missing_files(directory, steps):
            print_line(f"{file} is missing. Put back a copy of it: a study needs it for intervals.")


def trained(config: Config, workdir: str | Path) -> str | Path:
    """Return the directory of the checkpoint that represents a run.

    This is the directory of the last end with a checkpoint, else the workdir.
    """
    cooldowns = [segment for segment in segments(config) if segment.is_cooldown]
    for segment in reversed(cooldowns):
        directory = segment.directory(workdir)
        if (directory / "checkpoints" / str(segment.end)).is_dir():
            return directory
    return workdir


def restore(workdir: str | Path, *, allow_code: Collection[str] = ()) -> tuple[Config, Model, Params, int, Mesh]:
    """Return config, model, parameters, step and mesh of the newest checkpoint.

    A run with several ends uses the last end with a checkpoint. `allow_code` lists the mixers from outside seqjax that
    may be run (`workdirs.load_config`). Raises `UserError` for a name that the run does not have.
    """
    config = workdirs.load_config(workdir, allow_code=allow_code)
    workdirs.require_named(workdir, config, allow_code)
    try:
        mesh = make_mesh(**dataclasses.asdict(config.mesh))
    except UserError:
        mesh = make_mesh()  # The run's mesh needs more devices, e.g. a pod.
    files = mirrors.readable(workdir)
    if not identity.require(files, label=str(workdir)) and (files / "run.json").is_file():
        StatusLine().say(f"{workdir}: {identity.NOT_CHECKED}.")
    rules = origin.read(files)["rules"]
    model = Model(
        config.model,
        max_len=config.train.seq_len,
        carry_from_zero=rules == 1,
        documents=document_ids(config.data),
    )
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        model.shapes,
        shardings(mesh, model.shapes, model.axes),
    )
    params, step = read_params(config, workdir, target)
    return config, model, params, step, mesh


def read_params(config: Config, workdir: str | Path, target: Params) -> tuple[Params, int]:
    """Return the parameters and step that `restore` reads.

    `target` gives shapes and shardings.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # Orbax warns about read-only use, intended here.
    try:
        directory = trained(config, workdir)
        run_identity = identity.recorded(mirrors.readable(directory))
        checkpoints = Checkpoints(directory, read_only=True, identity=run_identity)
        params_and_step = checkpoints.restore_params(target)
        checkpoints.close()
    finally:
        logging.set_verbosity(verbosity)
    return params_and_step
