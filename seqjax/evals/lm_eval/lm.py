"""Wrap a seqjax model for lm-evaluation-harness: `SeqjaxLM("runs/x")`.

The class is registered in lm_eval as `seqjax`. Each text starts with exactly one BOS, as documents do in training. This
applies to contexts, prompts, and the first window of `loglikelihood_rolling`, where BOS is an input and is not
predicted. Texts longer than `max_length` tokens lose their beginning, as in lm_eval's own `hf` model.
"""

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

import seqjax
from seqjax.convert.directory import fetched, is_public
from seqjax.decoding import Sampling, encode
from seqjax.errors import UserError
from seqjax.evals.generation import Prompt, generate
from seqjax.evals.scoring import score
from seqjax.nn.params import count, fingerprint
from seqjax.pretrained import Pretrained, load
from seqjax.training.evaluate import restore

MAX_NEW_TOKENS = 256  # for tasks without this setting, as in lm_eval's `hf` model
UNKNOWN_LENGTH = 2048  # max_length for a public model without a position table, as in lm_eval
_N_NEW = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first present name is used


class SeqjaxLM(TemplateLM):
    """A seqjax model for `lm_eval.simple_evaluate(model=SeqjaxLM("runs/x"), ...)`."""

    def __init__(
        self,
        workdir: str | os.PathLike[str] | Pretrained,
        *,
        max_length: int = 0,
        batch_tokens: int = 0,
        add_bos_token: bool = True,
        seed: int = 0,
        allow_code: str | Collection[str] = (),
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ):
        """Load the model.

        Args:
            workdir: A run, a public model's directory, hf://OWNER/NAME, or a result of `seqjax.load`.
            max_length: Maximum tokens fed at once. 0 selects the training length for a run; for a public model, the
                size of its position table, or 2,048 without a table.
            batch_tokens: Tokens per batch; 0 = 16,384, or 4,096 on a CPU.
            add_bos_token: Whether texts start with BOS, as documents do in training.
            seed: Seed for sampling with a temperature.
            allow_code: Names of the run's mixers from outside seqjax that may execute code.
            batch_size: Accepts 1 or "auto", which lm_eval passes; ignored, because `batch_tokens` sets the batches.
            max_batch_size: Must be None; see `batch_size`.
            device: None, "cuda", "cuda:0" (the default in lm_eval's command) or the backend in use; ignored, because
                JAX chooses the device (JAX_PLATFORMS).

        Raises `UserError` for a workdir without a model, and for invalid arguments.
        """
        super().__init__()
        if batch_size not in (None, 0, 1, "1", "auto") or max_batch_size is not None:
            raise UserError(f"batch_size={batch_size}: set the batch size in tokens instead, as batch_tokens=16384.")
        if device not in (None, "cuda", "cuda:0", jax.default_backend()):
            raise UserError(f"device={device}: JAX chooses the device; set JAX_PLATFORMS=cpu or cuda instead.")
        for name, value in (("max_length", max_length), ("batch_tokens", batch_tokens)):
            if value < 0:
                raise UserError(f"{name}={value}: give at least 1, or 0 for the default.")
        allowed = (allow_code,) if isinstance(allow_code, str) else allow_code
        self.pretrained = workdir if isinstance(workdir, Pretrained) else _load(workdir, allowed)
        self.workdir = "" if isinstance(workdir, Pretrained) else os.fspath(workdir)
        model = self.pretrained.model
        if model.longest and max_length > model.longest:
            raise UserError(
                f"max_length={max_length}: the model has a table of {model.longest} positions; give {model.longest} or "
                "fewer."
            )
        as_trained = self.pretrained.config.train.seq_len if self.pretrained.step else UNKNOWN_LENGTH
        self.max_length = max_length or model.longest or as_trained
        self.batch_tokens = batch_tokens or (4096 if jax.default_backend() == "cpu" else 16384)
        self.add_bos_token = add_bos_token
        self.seed = seed

    # ------------------------------------------------------------------------------------------------------- tokens
    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        return self.pretrained.tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        """The token that starts a document.

        lm_eval uses it as the context for texts without a context.
        """
        return self.pretrained.tokenizer.bos

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer key for lm_eval's request caches."""
        tokenizer = self.pretrained.tokenizer
        return f"{tokenizer.name}-{tokenizer.hash[:12]}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the token ids for `string`.

        They start with one BOS unless `add_special_tokens` is False.
        """
        del kwargs
        tokenizer = self.pretrained.tokenizer
        ids = encode(tokenizer, string, vocab_size=self.pretrained.model.config.vocab_size).tolist()
        with_bos = self.add_bos_token if add_special_tokens is None else add_special_tokens
        return [tokenizer.bos, *ids] if with_bos and ids[:1] != [tokenizer.bos] else ids

    # ------------------------------------------------------------------------------------------------------ requests
    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Return (log-probability in nats, whether it is greedy) per continuation."""
        del disable_tqdm, kwargs
        try:
            scores = score(
                self.pretrained.model,
                self.pretrained.params,
                [(context, continuation) for _, context, continuation in requests],
                max_length=self.max_length,
                batch_tokens=self.batch_tokens,
                mesh=self.pretrained.mesh,
            )
        except ValueError as error:
            longer = "" if self.pretrained.model.longest else " A larger max_length is possible with this model."
            raise UserError(
                f"An example of the task cannot be scored: {error}. Lower --num_fewshot, or leave out the task.{longer}"
            ) from None
        for (texts, _, _), result in zip(requests, scores, strict=True):
            if texts is not None:  # None for a window of a longer text
                self.cache_hook.add_partial("loglikelihood", texts, tuple(result))
        return [(result.log_p, result.is_greedy) for result in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, in nats.

        Long texts are scored in lm_eval's windows of `max_length` tokens. Texts are encoded without BOS, because the
        first window gets BOS as its context; a second BOS would be predicted.
        """
        windows, texts = [], [request.args[0] for request in requests]
        owner = []
        for i, text in enumerate(texts):
            ids = self.tok_encode(text, add_special_tokens=False)
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(pair)))
                owner.append(i)
        totals = [0.0] * len(texts)
        for i, (log_p, _) in zip(owner, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[i] += log_p
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation for each context.

        It ends before the first `until` string or at EOS. Raises `UserError` for unknown generation settings.
        """
        del disable_tqdm
        prompts = [self._prompt(*request.args) for request in requests]
        texts = generate(self.pretrained, prompts, batch_tokens=self.batch_tokens, seed=self.seed)
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _prompt(self, context: str, settings: Mapping[str, Any]) -> Prompt:
        until, n_new, sampling = generation_settings(settings)
        sampling.check(vocab_size=self.pretrained.model.config.vocab_size)
        room = self.max_length - n_new
        if room < 1:
            raise UserError(
                f"The task requests {n_new} new tokens, and max_length is {self.max_length} including the context. "
                "Give a larger --max_length, or train with longer sequences (config.train.seq_len)."
            )
        ids = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        return Prompt(ids, until, n_new, sampling)

    # ---------------------------------------------------------------------------------------------------- identity
    def get_model_info(self) -> dict[str, Any]:
        """Return the checkpoint's identity; lm_eval writes it to `config` in its results."""
        m = self.pretrained
        return {
            "workdir": self.workdir,
            "step": m.step,
            "model_num_parameters": count(m.params),
            "model_dtype": str(np.dtype(m.model.dtype)),
            "parameters_sha256": fingerprint(m.params),
            "tokenizer": self.tokenizer_name,
            "max_length": self.max_length,
            "add_bos_token": self.add_bos_token,
            "seqjax_version": seqjax.__version__,
            "device_kind": jax.devices()[0].device_kind,
        }


register_model("seqjax")(SeqjaxLM)


def generation_settings(settings: Mapping[str, Any]) -> tuple[tuple[str, ...], int, Sampling]:
    """Parse a task's `generation_kwargs`.

    Returns the stop strings, the number of new tokens and the sampling settings. Known settings are until, max_gen_toks
    (and its other names in lm_eval), do_sample, temperature, top_k and top_p; `UserError` for any other. Empty stop
    strings are dropped. If do_sample is missing, a temperature above 0 enables sampling. The default temperature for
    do_sample is 1.
    """
    rest = dict(settings)
    until = rest.pop("until", None) or ()
    until = tuple(s for s in ((until,) if isinstance(until, str) else until) if s)
    counts = [value for name in _N_NEW if (value := rest.pop(name, None)) is not None]
    n_new = int(counts[0]) if counts else MAX_NEW_TOKENS
    temperature = rest.pop("temperature", None)
    do_sample = rest.pop("do_sample", None)
    top = {name: rest.pop(name) for name in ("top_k", "top_p") if name in rest}
    if rest:
        known = ", ".join(("until", *_N_NEW, "do_sample", "temperature", "top_k", "top_p"))
        raise UserError(f"generation_kwargs: {', '.join(sorted(rest))} is not supported. Supported: {known}.")
    if n_new < 1:
        raise UserError(f"generation_kwargs: max_gen_toks={n_new}; give at least 1.")
    if do_sample is None:
        do_sample = bool(temperature)
    if not do_sample:
        return until, n_new, Sampling(temperature=0.0)
    return until, n_new, dataclasses.replace(Sampling(temperature=1.0 if temperature is None else temperature), **top)


def _load(workdir: str | os.PathLike[str], allow_code: Collection[str]) -> Pretrained:
    if is_public(directory := fetched(workdir)):
        return load(directory)
    config, model, params, step, mesh = restore(os.fspath(workdir), allow_code=allow_code)
    return Pretrained(model=model, params=params, config=config, step=step, mesh=mesh)
