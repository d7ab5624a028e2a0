"""The contract for all mixers.

A new file under seqjax/mixers/ is tested here automatically. The tests cover causality, equality of parallel and
recurrent form, FLOPs, state sizes and parameters. Most checks come from seqjax/testing.py, which also serves mixers
outside the package.
"""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from seqjax import mixers, testing
from seqjax.mixers._attention import AttentionMixer
from seqjax.mixers.top1_chunk import Top1Chunk
from seqjax.models import flops
from seqjax.nn import params
from seqjax.types import Layer
from tests import support

B = 8
T = 23  # no multiple of 4 (chunk size in the tiny configs) or 5 (window)
# The right-hand mixers run the same code in quick tests, with other settings.
TWINS = {
    "transformer": "transformer_pp",
    "deltanet": "gated_deltanet",
    "rwkv5": "rwkv6",
    "precond_gated_deltanet": "precond_kda",
    "comba": "precond_kda",
}


def is_quick(mixer, variant):
    return support.is_first(mixer, variant) and mixer not in TWINS


every_case = pytest.mark.parametrize(("mixer", "variant"), support.slow_unless(is_quick, support.CASES))


@functools.cache
def built(mixer, variant):
    return testing.Case(support.tiny_model(mixer, variant))


def test_every_mixer_has_a_config_file_and_is_listed():
    assert {"transformer_pp", "top1_chunk", "top1_element"} <= set(mixers.names())
    for name in mixers.names():
        assert support.tiny(name, dict(support.FIRST)[name]).model.mixer.name == name
    assert set(support.VARIANTS) <= set(mixers.names()), "variants of a mixer that is gone"


# ----------------------------------------------------------------------------------------------------------- causality
@every_case
def test_a_token_changes_nothing_before_it(mixer, variant):
    testing.check_causality(built(mixer, variant))


@pytest.mark.parametrize(
    ("mixer", "variant"),
    support.slow_unless(lambda *case: support.represents(*case) and case[0] != "rwkv7", support.CASES),
)
def test_gradients_flow_from_the_past_only(mixer, variant):
    testing.check_gradient_causality(built(mixer, variant))


# ---------------------------------------------------------------------------------------------------- packed documents
RESETTING = [case for case in support.CASES if mixers.load(case[0]).resets and case[1] not in ("const_qk", "random")]


@pytest.mark.parametrize(
    ("mixer", "variant"),
    support.slow_unless(
        lambda *case: case[0] in ("gated_deltanet", "top1_chunk") and support.is_first(*case), RESETTING
    ),
)
def test_packed_documents_stay_apart(mixer, variant):
    testing.check_reset(built(mixer, variant))


# ----------------------------------------------------------------------------------------- parallel and recurrent form
@pytest.mark.parametrize(
    ("mixer", "variant", "n_prompt"),
    support.slow_unless(
        lambda mixer, variant, n: (
            (n == 5 and is_quick(mixer, variant)) or (n == 0 and support.represents(mixer, variant))
        ),
        [(*case, n) for case in support.CASES for n in (0, 1, 5, 12)],
    ),
)
def test_step_equals_the_parallel_form(mixer, variant, n_prompt):
    """Use four prompt lengths.

    Empty; one token; a full window plus a partial chunk; whole chunks, longer than the window.
    """
    testing.check_step(built(mixer, variant), [n_prompt])


# One mixer per cache kind: ring buffer and convolution inputs; chunk means; KV cache and RWKV's previous tokens; ring
# buffer with gate sums; block means; recurrent state. tests/end_to_end/test_generate.py covers plain KV caches.
PIECES = [
    ("transformer_pp", "conv_window_gqa"),
    ("top1_chunk", "approx"),
    ("rwkv7_shell", "top1_exact"),
    ("fox", "window_gqa"),
    ("nsa", "gqa"),
    ("mamba2", "full"),
]


@pytest.mark.parametrize(("mixer", "variant"), support.slow_unless(lambda *case: case in PIECES, support.CASES))
def test_chunked_prefill_equals_whole_prefill(mixer, variant):
    testing.check_pieces(built(mixer, variant))


def test_chunked_prefill_uses_the_right_positions():
    """Combine learned positions, constant queries and keys, and ALiBi.

    The cache is a ring buffer.
    """
    settings = {"model__learned_positions": True, "model__mixer__const": "qk"}
    testing.check_pieces(testing.Case(support.tiny_model("transformer_pp", "alibi_window_gqa", **settings)))


@pytest.mark.parametrize(("mixer", "variant"), support.slow_unless(support.represents, support.CASES))
def test_longer_caches_give_equal_results(mixer, variant):
    testing.check_long_cache(built(mixer, variant))


@pytest.mark.parametrize(
    ("mixer", "variant"),
    support.slow_unless(lambda mixer, variant: mixer == "mamba2", support.FIRST),
)
def test_long_sequences(mixer, variant):
    testing.check_output(built(mixer, variant))
    testing.check_long(built(mixer, variant))


@pytest.mark.parametrize(("mixer", "variant"), support.slow_unless(support.represents, support.FIRST))
def test_one_token_is_a_sequence(mixer, variant):
    case = built(mixer, variant)
    tokens = support.random_tokens((B, T))
    # RWKV's norm per head divides a single token's small output: half an ulp on its weights moves logits by 2e-5 (GLA:
    # 7e-5, Mamba-2: 2e-6). Two programs that round differently cannot agree better.
    tol = 5e-5 if mixer.startswith(("rwkv", "gla")) else 1e-5
    one, whole = case.logits(case.params, tokens[:, :1]), case.logits(case.params, tokens)
    np.testing.assert_allclose(one[:, 0], whole[:, 0], rtol=tol, atol=tol)


# -------------------------------------------------------------------------------------------------- declared quantities
# Expected cache elements in a layer after n tokens, at width 32 with 4 heads. Attention: keys and values for 4 heads of
# 8. Otherwise: the state and the last convolution inputs.
STATE = {
    "transformer": lambda n: 64 * n,
    "transformer/window": lambda n: 64 * min(n, 5),
    "transformer_pp": lambda n: 64 * n,
    "transformer_pp/window": lambda n: 64 * min(n, 5),
    "transformer_pp/gqa": lambda n: 32 * n,
    "transformer_pp/alibi_window_gqa": lambda n: 32 * min(n, 5),
    "transformer_pp/conv": lambda n: 64 * n + 3 * (32 + 32 + 32),
    "transformer_pp/conv_window_gqa": lambda n: 32 * min(n, 5) + 3 * (32 + 16 + 16),
    "transformer_pp/conv_alibi": lambda n: 64 * n + 3 * (32 + 32 + 32),
    "top1_element": lambda n: 64 * n,
    "top1_element/conv": lambda n: 64 * n + 3 * (32 + 32 + 32),
    "top1_element/gqa": lambda n: 32 * n,
    "top1_chunk": lambda n: 64 * n,
    "top1_chunk/gqa": lambda n: 32 * n,
    "top1_chunk/approx": lambda n: 64 * n + 32 * (n // 4),  # plus a mean key per chunk
    "top1_chunk/approx_top_k": lambda n: 64 * n + 32 * (n // 4),
    "top1_chunk/approx_gqa": lambda n: 16 * n + 8 * (n // 4),
    "top1_chunk/shortlist": lambda n: 64 * n + 2 * 32 * (n // 4),  # plus a mean key and an eigenvector per chunk
    "top1_chunk/shortlist_gqa": lambda n: 32 * n + 8 * 16 * (n // 8),  # plus eight means per chunk
    "top1_chunk/conv": lambda n: 64 * n + 3 * (32 + 32 + 32),
    "top1_chunk/conv_approx_gqa": lambda n: 32 * n + 16 * (n // 4) + 3 * (32 + 16 + 16),
    "fox": lambda n: 68 * n,  # plus one gate sum per head and key
    "fox/window_gqa": lambda n: 36 * min(n, 5),
    "fox/pro": lambda n: 68 * n + 64,  # plus the last key and value
    "fox/conv": lambda n: 68 * n + 3 * (32 + 32 + 32),
    "mesa_net": lambda n: 4 * 8 * (8 + 8) + 3 * (32 + 32),
    # changes of W and b and their gradient sums; the convolutions' last inputs
    "ttt_linear": lambda n: 2 * 4 * (8 * 8 + 8) + 3 * 32,
    "ttt_linear/base": lambda n: 2 * 4 * (8 * 8 + 8),
    "parallax": lambda n: 64 * n,
    "parallax/gqa": lambda n: 32 * n,
    "wall": lambda n: 64 * n + 32 * n,  # plus the sum of each key's log decays
    "wall/gqa": lambda n: 32 * n + 32 * n,
    "path": lambda n: 64 * n + 2 * 32,  # plus the last convolution inputs
    "path/gqa_gates": lambda n: 36 * n + 2 * 16,
    "nsa": lambda n: 32 * n + 32 * (n // 4),  # plus a mean key and value per block
    "nsa/conv_gqa": lambda n: 32 * n + 32 * (n // 4) + 3 * (32 + 16 + 16),
    "msa": lambda n: 40 * n,  # plus an index key
    "msa/conv_gqa": lambda n: 38 * n + 3 * (32 + 16 + 16),
    "dsa": lambda n: 72 * n,
    "dsa/conv_gqa": lambda n: 64 * n + 3 * (32 + 16 + 16),
    "rwkv7_shell": lambda n: 64 * n + 32,  # plus the previous token
    "rwkv7_shell/top1_approx": lambda n: 64 * n + 32 * (n // 4) + 32,
    "rwkv7_shell/window": lambda n: 64 * min(n, 5) + 32,
    "rwkv7_shell/window_norm": lambda n: 64 * min(n, 5) + 32,
    "rwkv5": lambda n: 4 * 8 * 8 + 32,
    "rwkv6": lambda n: 4 * 8 * 8 + 32,
    "rwkv7": lambda n: 4 * 8 * 8 + 32,
    "deltanet": lambda n: 4 * 8 * 8 + 3 * (32 + 32 + 32),
    "gated_deltanet": lambda n: 4 * 6 * 12 + 3 * (24 + 24 + 48),
    "gated_deltanet/bare": lambda n: 4 * 6 * 12,
    "gated_deltaproduct": lambda n: 4 * 4 * 10 + 3 * (16 + 2 * 16 + 2 * 40),
    "gated_deltaproduct/three_steps": lambda n: 4 * 4 * 10 + 3 * (16 + 3 * 16 + 3 * 40),
    "gla": lambda n: 4 * 4 * 8,
    "mlstm": lambda n: 4 * 4 * (8 + 1),  # values and the normaliser
    "kda": lambda n: 4 * 8 * 8 + 3 * (32 + 32 + 32),
    "gated_deltanet/value_heads": lambda n: 8 * 6 * 6 + 3 * (24 + 24 + 48),
    "mla": lambda n: (10 + 4) * n,
    "post_norm_attention": lambda n: 64 * n,
    "comba": lambda n: 4 * 6 * 12 + 3 * (24 + 24 + 48),
    "precond_gated_deltanet": lambda n: 4 * 6 * (12 + 1) + 3 * (24 + 24 + 48),  # plus the keys' curvature
    "precond_kda": lambda n: 4 * 8 * (8 + 1) + 3 * (32 + 32 + 32),
    "mamba1": lambda n: 64 * 16 + 3 * 64,
    "mamba1/bare": lambda n: 64 * 16,
    "mamba2": lambda n: 64 * 8 + 3 * (64 + 2 * 8),
    "mamba2/bare": lambda n: 64 * 8,
    # State; the last token's x, B, angles and weights.
    "log_linear_mamba2": lambda n: min(4, n.bit_length()) * 64 * 8 + 3 * (64 + 2 * 8),
    "mamba3": lambda n: 64 * 8 + 64 + 8 + 4 * 2 + 4,
    "mamba3/softplus": lambda n: 64 * 8 + 64 + 8 + 4 * 4 + 4,
    "based_conv": lambda n: 2 * 64,
}


@every_case
@pytest.mark.parametrize("seq_len", [1, 4, T])
def test_state_size_counts_the_cache(mixer, variant, seq_len):
    block = built(mixer, variant).model.abstract_blocks()[0]
    expected = STATE.get(f"{mixer}/{variant}", STATE.get(mixer))
    if expected is not None:
        assert block.mixer.state_size(seq_len) == expected(seq_len)
    has_channel_mix = mixer.startswith("rwkv")  # it caches the previous token as well
    assert block.state_size(seq_len) == block.mixer.state_size(seq_len) + 32 * has_channel_mix


SHIPPED = {key.partition("/")[0] for key in STATE} | {"based_linear"}
SUMS = {"state_BHKV", "s_BHKV", "state_BEN", "state_BHNV", "state_BHFV", "table_BcGPK", "forgotten_BSH"}
SUMS |= {
    "states_BLHNV",
    "turns_BHR",
    "gamma_BH",
    "k_mean_BcGK",
    "v_mean_BcGK",
    "decay_BSHK",
    "w_BHKK",
    "b_BH1K",
    "dw_BHKK",
    "db_BH1K",
}  # sums, their weights, and means


@pytest.mark.parametrize(
    ("mixer", "variant"), [*(case for case in support.FIRST if case[0] in SHIPPED), ("top1_chunk", "approx")]
)
def test_sums_in_caches_are_float32_in_bfloat16(mixer, variant):
    """Keys, values and previous inputs have the model's dtype."""
    block = support.tiny_model(mixer, variant).abstract_blocks()[0]
    cache = jax.eval_shape(lambda: block.init_cache(2, T, jax.numpy.bfloat16))
    wide = SUMS | ({"k_BSGK"} if mixer == "path" else set())  # each token updates all of PaTH's keys
    for path, x in jax.tree.leaves_with_path(cache):
        name = getattr(path[-1], "name", "")
        assert x.dtype == {"length": "int32"}.get(name, "float32" if name in wide else "bfloat16"), name


@pytest.mark.parametrize(("mixer", "variant"), support.slow_unless(support.represents, support.CASES))
def test_parameters_are_declared_as_they_are_made(mixer, variant):
    case = built(mixer, variant)
    testing.check_parameters(case)
    assert flops.n_params(case.model) == params.count(case.params)


# Smallest accepted ratio of our FLOPs to XLA's. XLA counts whole [T, S] score matrices, and for Top-1 Chunk a second
# score matrix for the selection. We count only unmasked entries: half for causal attention, 5 / T for a window, two
# chunks of 4 for Top-1 Chunk. XLA also counts norms, activations and softmax, a tenth of this small layer. At T = 128
# and D = 64, parameter products are 0.6 to 0.75 of XLA's FLOPs.
FLOPS_FLOOR = {
    "transformer/window": 0.65,
    "transformer_pp/window": 0.65,
    "transformer_pp/alibi_window_gqa": 0.6,
    "transformer_pp/conv_window_gqa": 0.6,
    "fox/window_gqa": 0.6,
    "top1_chunk": 0.6,
    "path": 0.65,  # XLA multiplies queries by all chunk matrices; half are masked
    "wall": 0.55,  # XLA also counts masked scores, and the scores within groups twice
    "msa": 0.6,  # all scores of the index
    "dsa": 0.6,  # all scores of the index and of the attention
    "nsa": 0.55,  # three branches, each with a full score matrix
    "rwkv7_shell": 0.6,
}
DEFAULT_FLOOR = 0.75


@pytest.mark.parametrize(("mixer", "variant"), support.slow_unless(support.represents, support.CASES))
def test_flops_against_xla_on_one_layer(mixer, variant):
    floor = FLOPS_FLOOR.get(f"{mixer}/{variant}", FLOPS_FLOOR.get(mixer, DEFAULT_FLOOR))
    testing.check_flops(built(mixer, variant), floor)


ATTENTION = [
    (m, v)
    for m, v in support.CASES
    # Convolutions and the shift in FoX's Pro block read further back than the counted keys, and PaTH has additional
    # products. An index has a backward pass of its loss.
    if m not in ("path", "msa", "dsa")
    and issubclass(mixers.load(m), AttentionMixer)
    and not {"gqa", "conv", "pro"}.intersection(v.split("_"))
]


@pytest.mark.parametrize(("mixer", "variant"), support.slow_unless(support.represents, ATTENTION))
def test_flops_count_the_keys_that_are_read(mixer, variant):
    """One layer with one head: gradients reveal the keys that each query read.

    QK^T and PV take 2 K FLOPs each per pair, and so does the second score of Parallax.
    """
    model = support.tiny_model(mixer, variant, model__n_layers=1, model__mixer__heads=1)
    pairs = np.count_nonzero(testing.reach(testing.Case(model)))
    bound = model.abstract_blocks()[0].mixer
    forward = bound.flops_per_token(T)
    forward = (bound.train_flops_per_token(T) - forward) / 2  # without the selection, which has no backward pass
    products = 1 if variant == "const_qk" else 3 if mixer == "parallax" else 2  # const: all sequences share QK^T
    assert forward == pytest.approx(products * 2 * 32 * pairs / T)


def test_flops_of_the_selection():
    """Count products of queries with keys or means.

    Exact selection multiplies each query by all keys in past chunks, approx by one mean per chunk.
    """
    past_chunks = sum(t // 4 for t in range(T))
    for variant, keys in (
        ("exact", 4),
        ("best_key", 4),
        ("best_key_int8", 4),
        ("approx", 1),
        ("top_k", 4),
        ("random", 0),
    ):
        bound = built("top1_chunk", variant).model
        mixer = bound.abstract_blocks()[0].mixer
        attention = (mixer.train_flops_per_token(T) - mixer.flops_per_token(T)) / 2
        assert mixer.flops_per_token(T) - attention == pytest.approx(2 * 32 * keys * past_chunks / T)


def test_flops_of_a_shortlist():
    """Count two rows per past chunk and the keys in two chunks.

    With at most two past chunks, all keys.
    """
    mixer = built("top1_chunk", "shortlist").model.abstract_blocks()[0].mixer
    for length in (8, 12, 13, T):
        past = [t // 4 for t in range(length)]
        numbers = sum(2 * n + 4 * min(n, 2) if max(past) > 2 else 4 * n for n in past)
        attention = (mixer.train_flops_per_token(length) - mixer.flops_per_token(length)) / 2
        assert mixer.flops_per_token(length) - attention == pytest.approx(2 * 32 * numbers / length)


# ----------------------------------------------------------------------------------------------------- chunk semantics
@pytest.mark.parametrize(
    ("chunk", "selection", "top_k"),
    [
        pytest.param(T, "exact", 1, marks=pytest.mark.slow),
        (12, "exact", 1),
        pytest.param(12, "best_key", 1, marks=pytest.mark.slow),
        pytest.param(12, "approx", 1, marks=pytest.mark.slow),
        (4, "approx", 5),
        (8, "shortlist", 2),
        (12, "random", 1),
    ],
)
def test_top1_chunk_is_full_attention_while_all_chunks_are_seen(chunk, selection, top_k):
    """Up to k + 1 chunks, Transformer++ gives the same outputs.

    A query then reads all keys. Both models use the same parameters.
    """
    full = support.tiny_model("transformer_pp", model__mixer__qk_norm=True)
    weights = support.random_params(full)
    overrides = {"model__mixer__chunk_size": chunk, "model__mixer__selection": selection, "model__mixer__top_k": top_k}
    chunked = support.tiny_model("top1_chunk", **overrides)
    tokens = support.random_tokens((2, T))
    want, got = jax.jit(full.logits)(weights, tokens), jax.jit(chunked.logits)(weights, tokens)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("selection", ["exact", "random"])
def test_decoding_reads_several_chunks(selection):
    """Decoding selects the same three of ten past chunks as the parallel form."""
    mixer = Top1Chunk(16, heads=2, chunk_size=2, top_k=3, selection=selection, layer=Layer(max_len=T), rngs=nnx.Rngs(0))
    x_BTD = 2 * jax.random.normal(jax.random.key(1), (2, T, 16))

    @jax.jit
    def decoded(x_BTD):
        def step(cache, x_BD):
            y_BD, cache = mixer.step(x_BD, cache)
            return cache, y_BD

        return jax.lax.scan(step, mixer.init_cache(2, T, x_BTD.dtype), x_BTD.swapaxes(0, 1))[1].swapaxes(0, 1)

    want = jax.jit(mixer)(x_BTD)
    np.testing.assert_allclose(decoded(x_BTD), want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


def test_a_chunk_changes_what_top1_chunk_computes():
    case = built("top1_chunk", "exact")
    other = support.tiny_model("top1_chunk", model__mixer__chunk_size=8)
    tokens = support.random_tokens((B, T))
    logits = case.logits(case.params, tokens) - jax.jit(other.logits)(case.params, tokens)
    difference = np.abs(np.asarray(logits)).max((0, 2))
    assert case.model.config.mixer.chunk_size == 4
    # Both read all keys up to two chunks of 4; after that, chunks of 4 read fewer.
    assert (difference[:8] < 1e-3).all()
    assert (difference[8:] > 1e-2).mean() > 0.8


# Where the chunk size only affects speed, it must not change the result. Top-1 mixers select chunks, so it changes
# theirs.
SELECTS = ("top1_chunk", "rwkv7_shell")
INVARIANT = [name for name in mixers.names() if name not in SELECTS and "chunk_size" in support.fields(name)]


@pytest.mark.parametrize(
    ("mixer", "chunk"),
    support.slow_unless(
        lambda mixer, chunk: chunk == 5 and mixer in (*support.REPRESENTATIVE, "gated_deltanet"),
        [(mixer, chunk) for mixer in INVARIANT for chunk in (1, 5, 8, 64)],
    ),
)
def test_chunk_size_does_not_change_the_result(mixer, chunk):
    testing.check_chunk_size(built(mixer, dict(support.FIRST)[mixer]), [chunk])
