"""`seqjax harness`: task selection, saved results and tables."""

import json
import sys

import pytest

from seqjax.errors import UserError
from seqjax.evals.lm_eval import __main__ as command
from seqjax.evals.lm_eval import results
from tests import extras, support
from tests.end_to_end.conftest import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # lm_eval and its imports warn
MODEL = {"step": 3, "parameters_sha256": "ab" * 32, "tokenizer": "byte-1", "max_length": 64, "add_bos_token": True}


@pytest.fixture(scope="module")
def tasks():
    """Import the module; lm_eval's import takes seconds."""
    extras.need("lm_eval")
    from seqjax.evals.lm_eval import tasks

    return tasks


def result(task, value, *, metric="acc", shots=0, limit=0, **more):
    """Return the part of a task's result file that the table reads."""
    return {
        "results": {task: {"alias": task, f"{metric},none": value, f"{metric}_stderr,none": 0.01}},
        "n-shot": {task: shots},
        "n-samples": {task: {"original": 100, "effective": 100}},
        "config": {"model_num_parameters": 1234},
        "lm_eval_version": "0.4.13",
        results.KEY: {"task": task, **MODEL, "limit": limit, "num_fewshot": shots},
        **more,
    }


def test_missing_lm_eval_is_an_error(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("seqjax.evals.lm_eval.lm", "seqjax.evals.lm_eval.tasks", "seqjax.evals.lm_eval.table"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"lm_eval: pip install 'seqjax\[harness\]'"):
        command.main([f"--workdir={tmp_path}", "--tasks=local"])


@pytest.mark.slow
def test_lm_eval_is_not_imported_with_seqjax():
    modules = "seqjax.commands.cli, seqjax.evals.lm_eval.__main__, seqjax.pretrained"
    code = f"import sys, {modules}; print('lm_eval' in sys.modules)"
    done = support.run([sys.executable, "-c", code])
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["--tasks=local", "--limit=-1"], "--limit .*-1"),
        (["--tasks=,"], "^--tasks: "),
        (["--tasks=local", "--workdir=gs://bucket/run"], "--workdir=gs://bucket/run .*--out"),
    ],
)
def test_bad_options_are_refused(argv, match):
    with pytest.raises(UserError, match=match):
        command.main(["--workdir=runs/x", *argv])


def test_task_names_and_fewshot(tasks, tmp_path):
    assert tasks.expanded(["local", "arc_easy", "local_copy"]) == [*tasks.LOCAL_TASKS, "arc_easy"]
    assert len(tasks.expanded(["paper"])) == 16
    assert [tasks.fewshot_of(name, None) for name in ("mmlu", "copa", "other")] == [5, 0, None]
    assert tasks.fewshot_of("mmlu", 0) == 0
    manager = tasks.manager([*tasks.LOCAL_TASKS, "local"], [])
    assert {*manager.all_tasks} == {*tasks.LOCAL_TASKS, "local"}  # the harness's own tasks are not read
    with pytest.raises(UserError, match=r"--include=.*none"):
        tasks.manager(["local"], [tmp_path / "none"])


@pytest.mark.slow
def test_paper_tasks_exist_in_the_harness(tasks):
    """An unknown name is refused."""
    known = {*tasks.manager(tasks.GROUPS["paper"], []).all_tasks}
    assert {*tasks.GROUPS["paper"]} <= known
    with pytest.raises(UserError, match=r"'arc_esy'.*'arc_easy'"):
        tasks.manager(["arc_esy"], [])


def test_missing_data_error_names_the_task(tasks, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\noutput_type: loglikelihood\ntest_split: test\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path}/none.jsonl\n"
        'doc_to_text: "{{a}}"\ndoc_to_target: "{{b}}"\n'
    )
    manager = tasks.manager(["mine"], [tmp_path])
    with pytest.raises(UserError, match=r"^mine: .*\(FileNotFoundError: .*HF_HOME"):
        manager.load(["mine"])


def test_results_are_reused_and_never_mixed(tasks, tmp_path):
    identities = {name: MODEL | {"limit": 0, "num_fewshot": 0} for name in ("copa", "piqa")}
    assert results.to_measure(results.read(tmp_path), identities, again=(), out=tmp_path) == ["copa", "piqa"]
    content = results.write(tmp_path, "copa", result("copa", 0.5) | {"samples": {"copa": [1]}}, identities["copa"])
    assert "samples" not in content
    (tmp_path / "other.json").write_text("{}")
    saved = results.read(tmp_path)
    assert saved == {"copa": content}
    assert results.to_measure(saved, identities, again=(), out=tmp_path) == ["piqa"]
    assert results.to_measure(saved, identities, again=["copa"], out=tmp_path) == ["copa", "piqa"]
    changed = {name: one | {"parameters_sha256": "cd" * 32, "step": 9} for name, one in identities.items()}
    for names in (["copa", "piqa"], ["piqa"]):
        requested = {name: changed[name] for name in names}
        with pytest.raises(UserError, match=r"copa\.json .*parameters_sha256 abababababab, now cdcd.*--again"):
            results.to_measure(saved, requested, again=(), out=tmp_path)
    limited = {name: one | {"limit": 5} for name, one in identities.items()}
    with pytest.raises(UserError, match=r"copa\.json .*limit 0, now 5\."):
        results.to_measure(saved, limited, again=(), out=tmp_path)
    assert results.to_measure(saved, {"piqa": limited["piqa"]}, again=(), out=tmp_path) == ["piqa"]


def test_tables_use_the_papers_metric_and_fewshot(tasks):
    """A group has its own row; an average needs all columns."""
    from seqjax.evals.lm_eval import table

    saved = {
        "copa": result("copa", 0.75),
        "arc_easy": result("arc_easy", 0.5, metric="acc_norm"),
        "boolq": result("boolq", 0.6, shots=5),
        "sciq": result("sciq", 0.9, metric="acc_norm", limit=10),
        "mmlu": result("mmlu_a", 0.2, shots=5)
        | {"groups": {"mmlu": {"acc,none": 0.25, "acc_stderr,none": 0.1}}, "group_subtasks": {"mmlu": ["mmlu_a"]}},
        "mine": result("mine", 1e9, metric="perplexity"),
    }
    page = table.markdown(saved, name="runs/x")
    assert "| mmlu | acc | 0.2500 | 0.1000 | 100 | 5 |" in page and "mmlu_a" not in page
    assert "| mine | perplexity | 1.000e+09 | 0.0100 | 100 | 0 |" in page
    assert "**sciq: " in page and "--limit" in page
    row = next(line for line in page.splitlines() if line.startswith("| **runs/x**"))
    assert row == "| **runs/x** | 25.00 |  | 50.00 |  |  |  |  |  |  | 75.00 |  |  |  |  |"
    assert "## Comparison with table 2" in page and "## Comparison with table 1" not in page
    every = {t.name: result(t.name, 0.5, metric=t.metric, shots=t.fewshot) for t in tasks.PAPER}
    page = table.markdown(every, name="runs/x")
    assert page.count("| 50.00 |") and "| **runs/x** | 50.00 | 50.00 | 50.00 | 50.00 |\n" in page
    assert "| Mamba-1 | 36.09 | 31.03 | 6.44 | 24.52 |" in page


def test_published_rows_give_the_papers_averages():
    """The module computes the averages; the paper prints them."""
    extras.need("lm_eval")
    from seqjax.evals.lm_eval import table

    printed = (50.43, 49.84, 50.68, 49.89, 49.30, 50.72, 49.90)
    rows = table.PUBLISHED[2].values()
    assert [round(sum(row) / len(row), 2) for row in rows] == pytest.approx(printed, abs=0.011)


def test_local_tasks_quote_held_out_texts(corpus_cache, tasks):
    """A context plus its right continuation is in a held-out text, including white space."""
    import lm_eval
    from lm_eval.api.model import LM

    from seqjax.evals.lm_eval.local import data

    recorded = []

    class Recorder(LM):
        def loglikelihood(self, requests):
            recorded.extend(request.args for request in requests)
            return [(-1.0, False)] * len(requests)

        def generate_until(self, requests):
            raise NotImplementedError

        loglikelihood_rolling = generate_until

    for task, right in (("local_continuation", lambda i: i // 4 % 4 == i % 4), ("local_last_word", lambda i: True)):
        recorded.clear()
        manager = tasks.manager([task], [], cache_dir=corpus_cache)
        lm_eval.simple_evaluate(model=Recorder(), tasks=[task], task_manager=manager, limit=8, bootstrap_iters=0)
        texts = data.held_out(corpus_cache)
        if task == "local_last_word":  # its passages have single spaces
            texts = [" ".join(text.split()) for text in texts]
        quotes = [context + target for i, (context, target) in enumerate(recorded) if right(i)]
        assert len(quotes) == 8 and all(any(quote in text for text in texts) for quote in quotes), task


@pytest.mark.slow
def test_local_tasks_on_a_run(blocks_dir, corpus_cache, tmp_path, capsys):
    """The second call measures nothing, and another checkpoint is refused."""
    config = support.run_config(blocks_dir, "rwkv7", data__cache_dir=corpus_cache, train__seq_len=128)
    write_checkpoint(tmp_path, config, 3)
    argv = [f"--workdir={tmp_path}", "--tasks=local", "--limit=6"]
    command.main(argv)
    first = capsys.readouterr().out
    assert first.count("of 6\n") == 8 and first.endswith(f"{tmp_path}/harness/table.md\n")
    saved = json.loads((tmp_path / "harness" / "local_copy.json").read_text())
    assert saved["config"]["model"] == "SeqjaxLM" and saved["versions"] == {"local_copy": 1.0}
    assert saved["seqjax"]["step"] == 3 and len(saved["seqjax"]["texts"]) == 64
    bits = json.loads((tmp_path / "harness" / "local_bits_per_byte.json").read_text())["results"]
    assert 7 < bits["local_bits_per_byte"]["bits_per_byte,none"] < 9  # random weights, 258 ids
    command.main(argv)
    assert capsys.readouterr().out == first.replace("of 6\n", "of 6  (measured before)\n")
    write_checkpoint(tmp_path, config, 4)
    with pytest.raises(UserError, match="step 3, now 4"):
        command.main(argv)
    command.main([*argv, "--again", "--tasks=local_last_word", f"--out={tmp_path / 'other'}"])
