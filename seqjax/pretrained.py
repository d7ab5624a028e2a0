"""Use a trained model in Python: `m = seqjax.load("runs/x")`.

Then call `m.generate("Once")` or `m.loss("Once upon")`.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from seqjax.command_line import use_safe_fusions
from seqjax.config import Config, differences, to_dict
from seqjax.convert import public_config
from seqjax.convert.directory import fetched, is_public
from seqjax.convert.directory import load as load_public
from seqjax.convert.weights import families_of
from seqjax.data.tokenizer import Tokenizer, load_tokenizer
from seqjax.decoding import PREFILL_CHUNK, Sampling, encode, stream
from seqjax.errors import UserError
from seqjax.escape import message
from seqjax.mixers import base, settings_class, use
from seqjax.mixers import load as load_mixer
from seqjax.models import Model, flops
from seqjax.nn.params import names, restricted
from seqjax.sharding import make_mesh, shardings
from seqjax.training.checkpoint import has_any
from seqjax.training.evaluate import read_params, restore, trained
from seqjax.training.loop import Weights
from seqjax.training.workdir import load_config
from seqjax.types import Array, Params


@dataclasses.dataclass(frozen=True, repr=False)
class Pretrained:
    """A run's newest checkpoint or a public model: parameters, config, tokenizer."""

    model: Model
    params: Params
    config: Config
    step: int  # the checkpoint's step
    mesh: Mesh  # the parameters are sharded over it

    def __repr__(self) -> str:
        """Return three lines: name, sizes and data."""
        config, data, n = self.config.model, self.config.data, flops.n_params(self.model)
        return message(
            f"{self.config.name}, size {self.config.size}, step {self.step}: {n:,} parameters\n"
            f"{config.n_layers} layers of width {config.dim}, mixer {config.mixer_names}, vocabulary "
            f"{config.vocab_size:,}\n"
            f"data {' '.join(filter(None, (data.corpus, data.path)))}, {data.regime} regime, tokenizer {data.tokenizer}"
        )

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer, loaded on first use.

        It may need an extra package.
        """
        return load_tokenizer(self.config.data.tokenizer, self.config.data.tokenizer_path)

    def generate(
        self,
        prompt: str = "",
        *,
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> str:
        """Return the continuation of `prompt`, without it, up to the end of the document.

        Args:
            prompt: Text to continue; an empty prompt starts a document.
            max_new_tokens: Maximum length of the continuation.
            temperature: 0 takes the most likely token.
            top_k: Sample from the k most likely tokens; 0 = all.
            top_p: Sample from the smallest set of tokens with at least this total probability; 1 = all.
            seed: Seed for sampling.
            stop: One or several texts; the continuation ends before the first of them.
            prefill_chunk: Prompt tokens per prefill call; 0 = all.

        Raises `UserError` for an invalid argument, or for more tokens than a position table has.
        """
        parts = self.stream(
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
            prefill_chunk=prefill_chunk,
        )
        return "".join(parts)

    def stream(
        self,
        prompt: str = "",
        *,
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> Iterator[str]:
        """Return an iterator over the text of `generate` as it is produced.

        It yields whole characters.
        """
        return stream(
            self.model,
            self.params,
            self.tokenizer,
            prompt,
            jax.random.key(seed),
            n_new=max_new_tokens,
            sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
            stop=stop,
            prefill_chunk=prefill_chunk,
            mesh=self.mesh,
        )

    def loss(self, text: str) -> float:
        """Return the mean loss in nats per token of `text` as the start of a document.

        Raises `UserError` for an empty text, or for more tokens than a position table has.
        """
        ids = encode(self.tokenizer, text, vocab_size=self.model.config.vocab_size)
        if len(ids) == 0:
            raise UserError("The loss of an empty text is not defined; give at least one character.")
        # Lengths are padded to powers of two: texts of similar lengths then share a compiled program. Padding after a
        # token does not affect its loss.
        padded = max(64, 1 << (len(ids) - 1).bit_length())
        if self.model.longest:
            padded = max(len(ids), min(padded, self.model.longest))
        tokens = np.zeros((1, padded + 1), np.int32)
        tokens[0, : len(ids) + 1] = [self.tokenizer.bos, *ids]
        weights = (np.arange(padded) < len(ids)).astype(np.float32)[None]
        with jax.set_mesh(self.mesh):
            return float(_mean_loss(self.params, tokens, weights, model=self.model))


@functools.partial(jax.jit, static_argnames="model")
def _mean_loss(params: Params, tokens_BT1: Array, weights_BT: Array, *, model: Model) -> Array:
    total, count = model.loss(params, tokens_BT1, weights_BT)
    return total / count


def load(
    path: str | os.PathLike[str],
    *,
    mixers: Sequence[type[base.Mixer]] = (),
    allow_code: str | Collection[str] = (),
) -> Pretrained:
    """Return the newest checkpoint of the run in `path`, or the public model there.

    Args:
        path: The `--workdir` of a training run or of `seqjax convert import`, also gs://. A Hugging Face directory with
            config.json, .safetensors and tokenizer (docs/convert.md). Or hf://OWNER/NAME to download a model.
        mixers: Mixer classes from outside seqjax that the run may use.
        allow_code: Names, as the run records them, of mixers from outside seqjax that may run code. The code is the
            run's copy of a file, or a dotted module. Other code is not trusted and does not run.

    Raises `UserError` if the run or model does not exist, if its mixer is from outside seqjax and not allowed, if a
    name in `allow_code` is not a mixer of the run, or if seqjax does not support the public model.
    """
    use_safe_fusions()  # as the commands do
    directory = fetched(path)
    if is_public(directory):
        return _public(directory)
    use(mixers)
    allowed = (allow_code,) if isinstance(allow_code, str) else allow_code
    config, model, params, step, mesh = restore(directory, allow_code=allowed)
    return Pretrained(model=model, params=params, config=config, step=step, mesh=mesh)


# Settings that change a model's output, for the same parameters, only through the order of sums.
MAY_DIFFER = re.compile(
    r"model\.(dtype|residual_dtype|remat|scan_layers|loss_(chunk|implementation)|init|mlp\.rescale_init|mixer(\[\d+\])?\.implementation):"
)


def weights_of(path: str) -> Weights:
    """Return the weights for `seqjax train --init_from=PATH`, read when needed.

    `path` is as for `load`.
    """
    source = path if "://" in path else str(Path(path).absolute())
    return Weights(source, lambda config, target: _read_weights(path, config, target))


def describe_weights(path: str, config: Config) -> str:
    """Return a line about the weights in `path`.

    Raises `UserError` if a run of `config` cannot begin with them.
    """
    directory = fetched(path)
    if is_public(directory):
        public_config.check(families_of(config), config, directory / "config.json")
        return f"from the public model {path}"
    source = _fitting(directory, path, config)
    if not has_any(trained(source, directory)):
        raise UserError(f"--init_from={path} has no checkpoint yet; let that run reach its first save.")
    own, theirs = ({name for name, _ in names(_model(each).shapes)} for each in (config, source))
    new = f"; {len(own - theirs)} arrays of the group auxiliary are new" if own - theirs else ""
    return f"from the newest checkpoint of {path}{new}"


def _read_weights(path: str, config: Config, target: Params) -> tuple[Params, int]:
    """Return the parameters in `path` and their step.

    Auxiliary parameters that the other run does not have are missing in the result.
    """
    directory = fetched(path)
    if is_public(directory):
        source_config, params = load_public(directory, config=config)
        _warn_of_tokenizer(path, source_config, config)
        return jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), params, target), 0
    source = _fitting(directory, path, config)
    _warn_of_tokenizer(path, source, config)
    return read_params(source, directory, restricted(target, _model(source).shapes))


def _warn_of_tokenizer(path: str, source_config: Config, config: Config) -> None:
    if source_config.data.tokenizer != config.data.tokenizer:
        logging.warning(
            "--init_from=%s: its tokenizer is %s, but this run's is %s, so token ids have another meaning here.",
            path,
            source_config.data.tokenizer,
            config.data.tokenizer,
        )


def _fitting(directory: Path, path: str, config: Config) -> Config:
    """Return the config of the run with the weights.

    Raises `UserError` unless its model fits.
    """
    source = load_config(directory, allow_code=[mixer.name for mixer in config.model.mixers])
    changed = differences({"model": to_dict(source.model)}, {"model": to_dict(_without_index(config, source).model)})
    if incompatible := [difference for difference in changed if not MAY_DIFFER.match(difference)]:
        raise UserError(
            f"--init_from={path} has another model than this run ({incompatible[0]}): copy its config.model, "
            "or take the weights of a run with the same config.model."
        )
    own_shapes, source_shapes = (dict(names(_model(c).shapes)) for c in (config, source))
    for name, x in source_shapes.items():
        if x.shape != own_shapes[name].shape:
            raise UserError(
                f"--init_from={path}: the parameter {name} has shape {x.shape}, but {own_shapes[name].shape} in "
                f"this run; set config.train.seq_len={source.train.seq_len}, on which the shape depends."
            )
    return source


def _model(config: Config) -> Model:
    return Model(config.model, max_len=config.train.seq_len)


def _without_index(config: Config, source: Config) -> Config:
    """Return the config with each mixer replaced by the mixer of `source` that it extends, if any.

    The settings that both have keep their values, and the others have their defaults.
    """
    ours, theirs = config.model.mixers, source.model.mixers
    if len(ours) != len(theirs):
        return config
    mixers = [_extended(x) if load_mixer(x.name).extends == y.name else x for x, y in zip(ours, theirs, strict=True)]
    mixer: Any = tuple(mixers) if isinstance(config.model.mixer, tuple) else mixers[0]
    return dataclasses.replace(config, model=dataclasses.replace(config.model, mixer=mixer))


def _extended(mixer: Any) -> Any:
    extends = load_mixer(mixer.name).extends
    assert extends is not None
    kind = settings_class(extends)
    shared = {field.name for field in dataclasses.fields(kind)} & {field.name for field in dataclasses.fields(mixer)}
    return kind(**{name: getattr(mixer, name) for name in shared} | {"name": extends})


def _public(directory: Path) -> Pretrained:
    config, params = load_public(directory)
    mesh = make_mesh()
    model = Model(config.model, max_len=config.train.seq_len)
    params = jax.device_put(params, shardings(mesh, model.shapes, model.axes))
    return Pretrained(model=model, params=params, config=config, step=0, mesh=mesh)
