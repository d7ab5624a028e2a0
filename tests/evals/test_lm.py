"""SeqjaxLM, the model class for lm-evaluation-harness: BOS, windows, generation settings, errors."""

import numpy as np
import pytest

from seqjax.data.tokenizer import ByteTokenizer
from seqjax.errors import UserError
from seqjax.evals.scoring import Score
from seqjax.models import Model
from seqjax.pretrained import Pretrained
from seqjax.sharding import make_mesh
from tests import extras, support
from tests.end_to_end.conftest import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # lm_eval and its imports warn


@pytest.fixture(scope="module")
def lm():
    """Import the module, which takes seconds."""
    extras.need("lm_eval")
    from seqjax.evals.lm_eval import lm

    return lm


@pytest.fixture
def model(lm):
    """Return a `SeqjaxLM` without parameters."""
    config = support.tiny("transformer_pp", model__vocab_size=258, train__seq_len=20)
    m = Pretrained(model=Model(config.model, max_len=20), params={}, config=config, step=1, mesh=make_mesh())
    return lm.SeqjaxLM(m)


def requests(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=args, idx=0) for args in arguments]


@pytest.fixture
def fed(model, lm, monkeypatch):
    """Stub the scoring; return the list of (context, continuation) token pairs."""
    pairs = []

    def score(model, params, requests, **settings):
        pairs.extend(requests)
        return [Score(-1.0 * len(continuation), True) for _, continuation in requests]

    monkeypatch.setattr(lm, "score", score)
    return pairs


def test_texts_start_with_one_bos(model, fed):
    bos, text = 256, [*b"ab"]
    assert model.tok_encode("ab") == [bos, *text] and model.tok_encode("ab", add_special_tokens=False) == text
    got = model.loglikelihood(requests("loglikelihood", [("ab", "cd"), ("", "cd"), ("ab ", "cd")]))
    assert fed == [([bos, *text], [*b"cd"]), ([bos], [*b"cd"]), ([bos, *text], [*b" cd"])]
    assert got == [(-2.0, True), (-2.0, True), (-3.0, True)]


def test_bos_id_may_be_zero(model, lm, fed, monkeypatch):
    tokenizer = ByteTokenizer()
    monkeypatch.setattr(tokenizer, "bos", 0, raising=False)
    monkeypatch.setattr(type(model.pretrained), "tokenizer", tokenizer)
    assert model.prefix_token_id == 0 and model.tok_encode("ab") == [0, *b"ab"]
    assert model.tok_encode("\0ab") == [*b"\0ab"]  # already starts with BOS
    model.loglikelihood(requests("loglikelihood", [("ab", "cd"), ("", "cd")]))
    model.loglikelihood_rolling(requests("loglikelihood_rolling", [("ab",)]))
    assert fed == [([0, *b"ab"], [*b"cd"]), ([0], [*b"cd"]), ([0], [*b"ab"])]
    seen = []
    monkeypatch.setattr(lm, "generate", lambda m, prompts, **_: seen.extend(prompts) or ["text"] * len(prompts))
    without_bos = lm.SeqjaxLM(model.pretrained, add_bos_token=False)
    without_bos.generate_until(requests("generate_until", [("", {"max_gen_toks": 5}), ("a", {"max_gen_toks": 5})]))
    assert [p.ids for p in seen] == [[0], [*b"a"]]


def test_rolling_loglikelihood_scores_each_token_once(model, fed):
    text = "abcdefghijklmnopqrstuvwxyz" * 2
    assert model.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,), ("",), ("x",)])) == [-52.0, 0, -1.0]
    assert fed[0] == ([256], [*text[:20].encode()])
    assert b"".join(bytes(continuation) for _, continuation in fed) == text.encode() + b"x"
    assert all(len(context) + len(continuation) <= 21 for context, continuation in fed)


def test_prompts_leave_room_for_new_tokens(model, lm, monkeypatch):
    seen = []
    monkeypatch.setattr(lm, "generate", lambda m, prompts, **_: seen.extend(prompts) or ["text"] * len(prompts))
    prompts = [("abc", {"until": "\n", "max_gen_toks": 5}), ("x" * 40, {"until": ["a", ""], "max_new_tokens": 8})]
    assert model.generate_until(requests("generate_until", prompts)) == ["text", "text"]
    assert [(len(p.ids), p.until, p.n_new, p.sampling.temperature) for p in seen] == [
        (4, ("\n",), 5, 0.0),
        (12, ("a",), 8, 0.0),
    ]
    with pytest.raises(UserError, match=r"20 new tokens, .*max_length .*20"):
        model.generate_until(requests("generate_until", [("a", {"max_gen_toks": 20})]))


def test_too_long_prompts_lose_their_beginning(model, lm, monkeypatch):
    seen = []
    monkeypatch.setattr(lm, "generate", lambda m, prompts, **_: seen.extend(prompts) or ["text"] * len(prompts))
    text = "abcdefghijklmnopqrstuvwxyz"
    prompts = [(text[:n], {"max_gen_toks": 8}) for n in (11, 12, 26)]
    model.generate_until(requests("generate_until", prompts))
    assert [p.ids for p in seen] == [[256, *b"abcdefghijk"], [*b"abcdefghijkl"], [*b"opqrstuvwxyz"]]


def test_position_table_limits_max_length(lm):
    config = support.tiny("transformer", model__vocab_size=258, train__seq_len=20)
    for step in (0, 1):
        m = Pretrained(model=Model(config.model, max_len=20), params={}, config=config, step=step, mesh=make_mesh())
        assert lm.SeqjaxLM(m).max_length == lm.SeqjaxLM(m, max_length=20).max_length == 20
        assert lm.SeqjaxLM(m, max_length=7).max_length == 7
        with pytest.raises(UserError, match="max_length=21"):
            lm.SeqjaxLM(m, max_length=21)


def test_generation_settings(lm):
    until, n_new, sampling = lm.generation_settings({"do_sample": True, "temperature": 0.5, "top_k": 3, "top_p": 0.9})
    assert (until, n_new) == ((), 256) and (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, 0.9)
    for greedy in ({}, {"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}):
        assert lm.generation_settings(greedy)[2].temperature == 0
    assert lm.generation_settings({"temperature": 0.7})[2].temperature == 0.7
    assert lm.generation_settings({"do_sample": True})[2].temperature == 1
    with pytest.raises(UserError, match=r"generation_kwargs: num_beams, penalty .*: until,"):
        lm.generation_settings({"num_beams": 3, "penalty": 1})
    with pytest.raises(UserError, match="max_gen_toks=0"):
        lm.generation_settings({"max_gen_toks": 0})


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"batch_size": 8}, "batch_size=8: .*batch_tokens"),
        ({"device": "cuda:1"}, "device=cuda:1: .*JAX_PLATFORMS"),
        ({"max_length": -1}, "max_length=-1"),
    ],
)
def test_unsupported_settings_are_refused(lm, model, settings, match):
    with pytest.raises(UserError, match=match):
        lm.SeqjaxLM(model.pretrained, **settings)


def test_too_long_continuation_is_refused(model):
    with pytest.raises(UserError, match=r"request 0 .*max_length=20.* larger max_length"):
        model.loglikelihood(requests("loglikelihood", [("", "x" * 21)]))


def test_model_type_is_registered_in_lm_eval(lm, blocks_dir, tmp_path):
    """`--model seqjax --model_args workdir=...`, plus the arguments that lm_eval's command adds."""
    from lm_eval.api.registry import get_model

    config = support.run_config(blocks_dir)
    write_checkpoint(tmp_path, config, 3)
    assert get_model("seqjax") is lm.SeqjaxLM
    arguments = f"workdir={tmp_path},max_length=40,add_bos_token=False"
    model = get_model("seqjax").create_from_arg_string(arguments, {"batch_size": 1, "device": "cuda:0"})
    assert (model.max_length, model.add_bos_token, model.pretrained.step) == (40, False, 3)
    assert model.tok_encode("ab") == [*b"ab"]
    info = model.get_model_info()
    assert (info["step"], info["workdir"], info["max_length"]) == (3, str(tmp_path), 40)
    default = lm.SeqjaxLM(tmp_path)
    assert default.max_length == config.train.seq_len
    assert default.get_model_info()["parameters_sha256"] == info["parameters_sha256"]
    changed = {**default.pretrained.params, "embed": np.asarray(default.pretrained.params["embed"]) + 1}
    object.__setattr__(default.pretrained, "params", changed)
    assert default.get_model_info()["parameters_sha256"] != info["parameters_sha256"]
