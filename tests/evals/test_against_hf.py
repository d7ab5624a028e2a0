"""SeqjaxLM and lm_eval's `hf` model give equal numbers and texts for equal weights and requests.

The weights are a tiny random Llama and Mamba from transformers, converted by `seqjax convert import`. lm_eval, torch
and transformers take half a minute to import, so these tests are marked slow.
"""

import importlib.util
import sys
import types

import numpy as np
import pytest

from seqjax.convert import __main__ as convert
from seqjax.convert import tokenizer_files
from tests import extras
from tests.convert.cases import config_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps until the sun is up again. \u00e9\u4e2d "
COMMON = {"vocab_size": 264, "num_hidden_layers": 2, "hidden_size": 32, "bos_token_id": 256, "eos_token_id": 257}
LLAMA = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 4096}
MAX_LENGTH = 100


def requests(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=args, idx=0) for args in arguments]


@pytest.fixture(scope="module", params=["llama", "mamba"])
def models(request, tmp_path_factory):
    """Return a transformers directory and a workdir with the same weights."""
    torch = extras.package("torch")
    transformers = extras.package("transformers")
    extras.need("lm_eval")
    model_class, settings = {
        "llama": (transformers.LlamaForCausalLM, COMMON | LLAMA),
        "mamba": (transformers.MambaForCausalLM, COMMON | {"state_size": 4}),
    }[request.param]
    torch.manual_seed(0)
    theirs = model_class(model_class.config_class(**settings)).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if not name.endswith("A_log"):
                p.add_(0.15 * torch.randn(p.shape))
    source, workdir = tmp_path_factory.mktemp(request.param), tmp_path_factory.mktemp("work") / "run"
    theirs.save_pretrained(source)
    for file, content in tokenizer_files.files_of(config_of("llama").data, max_length=None).items():
        (source / file).write_bytes(content)
    convert.main(["import", f"--weights={source}", f"--workdir={workdir}"])
    return source, workdir


def hf_model():
    """Return lm_eval's HFLM. It imports accelerate, which a loaded model does not need, so a stub is enough."""
    with pytest.MonkeyPatch.context() as patch:
        if not importlib.util.find_spec("accelerate"):
            package, utils = types.ModuleType("accelerate"), types.ModuleType("accelerate.utils")
            for name in ("Accelerator", "InitProcessGroupKwargs", "find_executable_batch_size"):
                setattr(package, name, lambda **_: lambda function: function)
            utils.get_max_memory = None
            patch.setitem(sys.modules, "accelerate", package)
            patch.setitem(sys.modules, "accelerate.utils", utils)
        from lm_eval.models.huggingface import HFLM
    return HFLM


def both(models, *, add_bos_token=True, max_length=MAX_LENGTH):
    import transformers

    from seqjax.evals.lm_eval.lm import SeqjaxLM

    source, workdir = models
    theirs = hf_model()(
        pretrained=transformers.AutoModelForCausalLM.from_pretrained(source).eval(),
        tokenizer=transformers.AutoTokenizer.from_pretrained(source),
        backend="causal",
        device="cpu",
        batch_size=1,
        max_length=max_length,
        add_bos_token=add_bos_token,
    )
    ours = SeqjaxLM(workdir, max_length=max_length, add_bos_token=add_bos_token)
    return theirs, ours


def assert_equal(got, want):
    np.testing.assert_allclose([x for x, _ in got], [x for x, _ in want], rtol=0, atol=1e-4)
    assert [bool(g) for _, g in got] == [bool(g) for _, g in want]


def test_loglikelihood_equals_hf(models):
    """Short, long, empty and truncated contexts, trailing spaces, and answers that differ in the last token."""
    theirs, ours = both(models)
    pairs = [(TEXT[:n], TEXT[n : n + k]) for n, k in ((1, 3), (5, 1), (20, 9), (63, 1), (64, 2), (80, 12))]
    pairs += [(TEXT * 3, " and more"), ("", "no context"), ("a trailing space ", "here")]
    pairs += [("One of four:", answer) for answer in (" A", " B", " C", " D", " Dog", " Cat")]
    greedy = theirs.generate_until(requests("generate_until", [(TEXT[:30], {"max_gen_toks": 4, "until": []})]))
    pairs += [(TEXT[:30], greedy[0])] if greedy[0] and "\ufffd" not in greedy[0] else []
    want = theirs.loglikelihood(requests("loglikelihood", pairs))
    assert_equal(ours.loglikelihood(requests("loglikelihood", pairs)), want)
    assert len({round(x, 3) for x, _ in want}) == len(want)  # so a swap of two requests is detected


def test_loglikelihood_rolling_equals_hf(models):
    """Windows of 40 tokens, because `hf` sums in float32: above 512 nats, the last bit is 6e-5."""
    theirs, ours = both(models, add_bos_token=False, max_length=40)
    texts = [(TEXT[:1],), (TEXT,), (TEXT * 2,), (TEXT[:40],), (TEXT[:41],), (TEXT[:13],)]
    want = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    got = ours.loglikelihood_rolling(requests("loglikelihood_rolling", texts))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_loglikelihood_rolling_does_not_predict_bos(models):
    """With add_bos_token, `hf` feeds one BOS and predicts a second; SeqjaxLM only feeds BOS."""
    theirs, ours = both(models)
    rolling = requests("loglikelihood_rolling", [(TEXT[:40],)])
    after_bos = requests("loglikelihood", [("", TEXT[:40])])
    assert abs(theirs.loglikelihood_rolling(rolling)[0] - ours.loglikelihood_rolling(rolling)[0]) > 1
    np.testing.assert_allclose(ours.loglikelihood_rolling(rolling)[0], theirs.loglikelihood(after_bos)[0][0], atol=1e-4)


def test_greedy_texts_equal_hf(models):
    theirs, ours = both(models)
    kwargs = [{"until": ["\n\n"], "max_gen_toks": 12}, {"until": ["e", " "], "max_gen_toks": 20, "do_sample": False}]
    prompts = [(TEXT[:n], settings) for n in (4, 37, 40, 90, 95) for settings in kwargs]
    prompts += [(TEXT * 2, kwargs[0])]
    want = theirs.generate_until(requests("generate_until", prompts))
    assert ours.generate_until(requests("generate_until", prompts)) == want
    assert len(set(want)) > 3


def test_multiple_choice_task_equals_hf(models, tmp_path):
    """A YAML task gives equal metrics and equal scores for each choice."""
    import json

    import lm_eval
    from lm_eval.tasks import TaskManager

    rows = [{"q": TEXT[i : i + 20], "c": [TEXT[i + 20 : i + 26], "x", "yes", f" {i}"], "a": i % 4} for i in range(12)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tiny.yaml").write_text(
        "task: tiny_choice\ndataset_path: json\noutput_type: multiple_choice\ntest_split: test\n"
        f"dataset_kwargs:\n  data_files:\n    test: {data}\n"
        'doc_to_text: "{{q}}"\ndoc_to_choice: "{{c}}"\ndoc_to_target: a\n'
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = [
        lm_eval.simple_evaluate(model=lm, tasks=["tiny_choice"], task_manager=manager, bootstrap_iters=0)
        for lm in both(models)
    ]
    theirs, ours = ([sample["resps"] for sample in result["samples"]["tiny_choice"]] for result in results)
    for want, got in zip(theirs, ours, strict=True):
        assert_equal([r[0] for r in got], [r[0] for r in want])
    assert results[0]["results"] == results[1]["results"]
