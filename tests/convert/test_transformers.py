"""Logits, ids and settings agree with transformers, for models it saved and for exports that it loads.

The texts are longer than the original context (16 tokens) of the models with scaled RoPE.

The tests need transformers, torch and tokenizers, which seqjax does not depend on, and are skipped without them.
tests/golden/make_convert.py compares fla's models, because fla's kernels need Triton.
"""

import random
from pathlib import Path

import jax
import numpy as np
import pytest

import seqjax
from seqjax.convert import __main__ as command
from seqjax.convert import directory, tokenizer_files
from seqjax.data import load_tokenizer
from seqjax.decoding import Sampling, tokens
from seqjax.errors import UserError
from seqjax.models import Model
from tests import extras, support
from tests.convert.cases import config_of
from tests.data.test_tokenizer import needs_mixtral

torch = extras.lazy("torch")
transformers = extras.lazy("transformers")
tokenizers = extras.lazy("tokenizers")

TEXT = "Once upon a time there was a model, and it was tiny.\n  Two spaces, a \u2581 mark and \u00e9\u4e2d\U0001f600."
COMMON = {"vocab_size": 300, "num_hidden_layers": 2, "hidden_size": 32, "bos_token_id": 0, "eos_token_id": 1}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 4.0,
    "low_freq_factor": 0.25,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "llama": (
        "LlamaForCausalLM",
        COMMON | ATTENTION | {"rope_theta": 5e5, "attention_bias": True, "head_dim": 16},
    ),
    "mistral": (
        "MistralForCausalLM",
        COMMON | ATTENTION | {"sliding_window": 7, "tie_word_embeddings": True},
    ),
    "llama3": (
        "LlamaForCausalLM",
        COMMON | ATTENTION | {"head_dim": 16, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "llama_linear": (
        "LlamaForCausalLM",
        COMMON | ATTENTION | {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}},
    ),
    "qwen2": ("Qwen2ForCausalLM", COMMON | ATTENTION | {"rms_norm_eps": 1e-5}),
    "qwen2_tied_window": (
        "Qwen2ForCausalLM",
        COMMON
        | ATTENTION
        | {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    ),
    "qwen3": ("Qwen3ForCausalLM", COMMON | ATTENTION | {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3_llama3": (
        "Qwen3ForCausalLM",
        COMMON | ATTENTION | {"head_dim": 16, "rope_parameters": LLAMA3, "attention_bias": True, "rms_norm_eps": 0.03},
    ),
    "gpt2": ("GPT2LMHeadModel", COMMON | {"n_head": 4, "n_positions": 96}),
    "mamba": ("MambaForCausalLM", COMMON | {"state_size": 4}),
    "mamba2": (
        "Mamba2ForCausalLM",
        COMMON | {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    ),
}


def bpe(path: Path, *, style: str = "gpt2") -> None:
    """Save a byte-level BPE tokenizer with 300 ids through transformers; `style`: gpt2, llama3 or qwen."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=style == "llama3"))
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style == "gpt2")
    tokenizer.pre_tokenizer, tokenizer.decoder = level, tokenizers.decoders.ByteLevel()
    if style != "gpt2":
        words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(words), "isolated")
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    if style == "qwen":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    if style == "llama3":
        start = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        level = tokenizers.processors.ByteLevel(trim_offsets=False)
        tokenizer.post_processor = tokenizers.processors.Sequence([level, start])
    bos = None if style == "qwen" else "<s>"  # Only Qwen's config.json states its bos.
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token="</s>")
    fast.save_pretrained(path)


def opened(path: Path):
    """Open model and tokenizer with transformers; no tensor may be missing or unexpected."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval(), transformers.AutoTokenizer.from_pretrained(path)


def their_logits(model, ids) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids)[None]).logits[0].float().numpy()


def our_logits(m, ids) -> np.ndarray:
    return np.asarray(jax.jit(m.model.logits)(m.params, np.asarray(ids, np.int32)[None])[0])


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def saved(kind: str, path: Path):
    """Save a random sharded model with a matching tokenizer; return the model."""
    class_name, settings = MODELS[kind]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not name.endswith("A_log"):
                p.add_(0.1 * torch.randn(p.shape))
    model.save_pretrained(path, max_shard_size="60KB")
    bpe(path, style="qwen" if "Qwen" in class_name else "llama3" if kind == "llama3" else "gpt2")
    return model


# The other models only combine features of these.
QUICK = [kind for kind in MODELS if kind not in ("llama_linear", "qwen2", "qwen3")]


@pytest.mark.parametrize("kind", support.slow_unless(lambda kind: kind in QUICK, MODELS))
def test_transformers_model_round_trip(kind, tmp_path, capsys):
    """seqjax and transformers agree on logits and ids, before import and after export."""
    source = tmp_path / "public"
    theirs = saved(kind, source)
    assert (source / "model.safetensors.index.json").is_file()
    model, tokenizer = opened(source)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    want = their_logits(model, ids)

    m = seqjax.load(source)
    assert m.tokenizer.encode(TEXT).tolist() == ids
    assert m.tokenizer.decode([m.tokenizer.bos, *ids, m.tokenizer.eos]) == TEXT
    assert int(m.tokenizer.n_bytes[ids].sum()) == len(TEXT.encode())
    assert len(ids) > 2 * LLAMA3["original_max_position_embeddings"]
    assert_close(our_logits(m, ids), want)

    command.main(["import", f"--weights={source}", f"--workdir={tmp_path / 'run'}"])
    command.main(["export", f"--workdir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"])
    assert "tokenizer huggingface" in capsys.readouterr().out
    exported, exported_tokenizer = opened(tmp_path / "out")
    assert type(exported) is type(theirs)
    tensors = theirs.state_dict()
    assert exported.state_dict().keys() == tensors.keys()
    assert all(torch.equal(x, tensors[name]) for name, x in exported.state_dict().items())
    assert_close(their_logits(exported, ids), want)  # Mamba-2's chunk size may differ; it is not a model setting.
    assert exported_tokenizer.encode(TEXT, add_special_tokens=False) == ids
    for key in ("bos_token_id", "eos_token_id", "vocab_size", "tie_word_embeddings"):
        assert getattr(exported.config, key) == getattr(theirs.config, key), key
    for key in ("rope_parameters", "layer_types", "sliding_window"):
        assert getattr(exported.config, key, None) == getattr(theirs.config, key, None), key


@pytest.mark.parametrize(
    "kind",
    support.slow_unless(lambda kind: kind == "llama3", ["llama3", "qwen2", "qwen2_tied_window", "qwen3"]),
)
def test_greedy_decoding_equals_transformers(kind, tmp_path):
    """Equal tokens and per-step logits, both with caches."""
    theirs, n_new = saved(kind, tmp_path), 40
    m = seqjax.load(tmp_path)
    ids = m.tokenizer.encode(TEXT)[:12]
    options = {"max_new_tokens": n_new, "do_sample": False, "eos_token_id": None}
    out = theirs.generate(torch.tensor([ids.tolist()]), output_logits=True, return_dict_in_generate=True, **options)
    want_ids = out.sequences[0, len(ids) :].numpy()
    want = torch.cat(out.logits).float().numpy()
    greedy = {"key": jax.random.key(0), "model": m.model, "n_new": n_new, "sampling": Sampling(temperature=0.0)}
    got_ids = np.concatenate(list(tokens(m.params, ids[None], **greedy)))
    np.testing.assert_array_equal(got_ids, want_ids)
    logits_BO, cache = jax.jit(m.model.prefill)(m.params, ids[None], m.model.init_cache(1, len(ids) + n_new))
    step, got = jax.jit(m.model.step), [logits_BO[0]]
    for i, token in enumerate(want_ids[:-1]):
        logits_BO, cache = step(m.params, token[None], np.int32(len(ids) + i), cache)
        got.append(logits_BO[0])
    assert_close(np.stack(got), want)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), ("llama", "bfloat16"), pytest.param("qwen3", "float32", marks=pytest.mark.slow)],
)
def test_transformers_opens_our_export(family, dtype, tmp_path):
    """With the byte tokenizer: bos and eos ids, dtype, logits and greedy text."""
    config = config_of(family, model__vocab_size=264)
    model = Model(config.model, max_len=config.train.seq_len)
    directory.export(support.random_params(model), config, tmp_path, dtype=dtype)
    theirs, tokenizer = opened(tmp_path)
    assert str(theirs.dtype) == f"torch.{dtype}"
    ids = tokenizer.encode(TEXT)
    assert ids == [256, *TEXT.encode()]
    assert (theirs.generation_config.bos_token_id, theirs.generation_config.eos_token_id) == (256, 257)
    m = seqjax.load(tmp_path)
    if dtype == "float32":
        assert_close(our_logits(m, ids), their_logits(theirs, ids))
        out = theirs.generate(torch.tensor(ids)[None], max_new_tokens=8, do_sample=False)[0, len(ids) :]
        assert tokenizer.decode(out, skip_special_tokens=True) == m.generate(TEXT, max_new_tokens=8, temperature=0)


@needs_mixtral
@pytest.mark.parametrize("name", ["byte", "mixtral"])
def test_exported_tokenizer_gives_our_ids(name, tmp_path):
    """The texts include ones that spell special tokens."""
    data = config_of("llama", data__tokenizer=name).data
    for file, content in tokenizer_files.files_of(data, max_length=None).items():
        (tmp_path / file).write_bytes(content)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(name)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos, ours.eos)
    parts = [*" .9\n\t\r\x00\u2581\u00e9\u4e2d\U0001f600\ufb01", "  ", "the", "Ab", "ing", " //", "12.5e3"]
    parts += ["<s>", "</s>", "<unk>", "<0x0A>", "<|eos|>"]
    draw = random.Random(0)
    texts = ["", *parts, *("".join(draw.choices(parts, k=12)) for _ in range(400))]
    for text in texts:
        ids = ours.encode(text).tolist()
        assert theirs.encode(text, add_special_tokens=False) == ids, text
        assert theirs.encode(text) == [ours.bos, *ids], text
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids), text
    # seqjax's own reader for the exported file gives the same ids.
    reloaded = load_tokenizer("huggingface", tmp_path)
    assert [reloaded.encode(text).tolist() for text in texts] == [ours.encode(text).tolist() for text in texts]
    assert (reloaded.bos, reloaded.eos, reloaded.vocab_size) == (ours.bos, ours.eos, ours.vocab_size)
    assert reloaded.adds_space == ours.adds_space
    np.testing.assert_array_equal(reloaded.n_bytes, ours.n_bytes)


def test_load_from_the_hub_cache(tmp_path, monkeypatch):
    """The real huggingface_hub, offline, with a cached snapshot."""
    hub = extras.package("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--owner--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    config = config_of("llama")
    model = Model(config.model, max_len=config.train.seq_len)
    directory.export(support.random_params(model), config, repository / "snapshots" / commit)
    m = seqjax.load("hf://owner/tiny")
    assert m.config.model.dim == config.model.dim
    assert m.tokenizer.name == "byte"
    with pytest.raises(UserError, match="hf://owner/other"):
        seqjax.load("hf://owner/other")
