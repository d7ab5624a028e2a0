"""`seqjax harness`: which tasks, what is kept of them, and the tables."""

import json
import sys

import pytest

from seqjax.errors import UserError
from seqjax.evals.lm_eval import __main__ as command
from seqjax.evals.lm_eval import results
from tests import extras, support
from tests.end_to_end.conftest import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # lm_eval and what it imports warn
MODEL = {"step": 3, "parameters_sha256": "ab" * 32, "tokenizer": "byte-1", "max_length": 64, "add_bos_token": True}


@pytest.fixture(scope="module")
def tasks():
    """The module; the import of lm_eval takes seconds."""
    extras.need("lm_eval")
    from seqjax.evals.lm_eval import tasks

    return tasks


def result(task, value, *, metric="acc", shots=0, limit=0, **more):
    """What is written for a task, as far as the table reads it."""
    return {
        "results": {task: {"alias": task, f"{metric},none": value, f"{metric}_stderr,none": 0.01}},
        "n-shot": {task: shots},
        "n-samples": {task: {"original": 100, "effective": 100}},
        "config": {"model_num_parameters": 1234},
        "lm_eval_version": "0.4.13",
        results.KEY: {"task": task, **MODEL, "limit": limit, "num_fewshot": shots},
        **more,
    }


def test_without_the_package(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("seqjax.evals.lm_eval.lm", "seqjax.evals.lm_eval.tasks", "seqjax.evals.lm_eval.table"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"seqjax harness needs lm_eval: pip install 'seqjax\[harness\]'"):
        command.main([f"--workdir={tmp_path}", "--tasks=local"])


@pytest.mark.slow
def test_lm_eval_is_not_imported_with_seqjax():
    modules = "seqjax.commands.cli, seqjax.evals.lm_eval.__main__, seqjax.pretrained"
    code = f"import sys, {modules}; print('lm_eval' in sys.modules)"
    done = support.run([sys.executable, "-c", code])
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--tasks=local", "--limit=-1"], "--limit must be at least 0, not -1"),
        (["--tasks=,"], "--tasks: give paper, local, or names"),
        (["--tasks=local", "--workdir=gs://bucket/run"], "give a directory of this machine for the results as --out"),
    ],
)
def test_options(argv, says):
    with pytest.raises(UserError, match=says):
        command.main(["--workdir=runs/x", *argv])


def test_names(tasks, tmp_path):
    assert tasks.expanded(["local", "arc_easy", "local_copy"]) == [*tasks.LOCAL_TASKS, "arc_easy"]
    assert len(tasks.expanded(["paper"])) == 16
    assert [tasks.fewshot_of(name, None) for name in ("mmlu", "copa", "other")] == [5, 0, None]
    assert tasks.fewshot_of("mmlu", 0) == 0
    manager = tasks.manager([*tasks.LOCAL_TASKS, "local"], [])
    assert {*manager.all_tasks} == {*tasks.LOCAL_TASKS, "local"}, "those of the harness are not read"
    with pytest.raises(UserError, match="there is no such directory; give one of YAML tasks"):
        tasks.manager(["local"], [tmp_path / "none"])


@pytest.mark.slow
def test_the_names_of_the_paper_are_in_the_harness(tasks):
    """And a name that is nobody's is refused."""
    known = {*tasks.manager(tasks.GROUPS["paper"], []).all_tasks}
    assert {*tasks.GROUPS["paper"]} <= known
    with pytest.raises(UserError, match=r"there is no task 'arc_esy'\. Did you mean 'arc_easy'"):
        tasks.manager(["arc_esy"], [])


def test_data_that_cannot_be_had_names_its_task(tasks, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\noutput_type: loglikelihood\ntest_split: test\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path}/none.jsonl\n"
        'doc_to_text: "{{a}}"\ndoc_to_target: "{{b}}"\n'
    )
    manager = tasks.manager(["mine"], [tmp_path])
    with pytest.raises(UserError, match=r"^mine: the task or its data could not be loaded \(FileNotFoundError: .*hub"):
        manager.load(["mine"])


def test_what_is_measured_is_kept_and_not_mixed(tasks, tmp_path):
    asked = {name: MODEL | {"limit": 0, "num_fewshot": 0} for name in ("copa", "piqa")}
    assert results.to_measure(results.read(tmp_path), asked, again=(), out=tmp_path) == ["copa", "piqa"]
    wrote = results.write(tmp_path, "copa", result("copa", 0.5) | {"samples": {"copa": [1]}}, asked["copa"])
    assert "samples" not in wrote
    (tmp_path / "other.json").write_text("{}")
    found = results.read(tmp_path)
    assert found == {"copa": wrote}
    assert results.to_measure(found, asked, again=(), out=tmp_path) == ["piqa"]
    assert results.to_measure(found, asked, again=["copa"], out=tmp_path) == ["copa", "piqa"]
    other = {name: one | {"parameters_sha256": "cd" * 32, "step": 9} for name, one in asked.items()}
    for names in (["copa", "piqa"], ["piqa"]):
        of = {name: other[name] for name in names}
        with pytest.raises(
            UserError,
            match=r"copa\.json is of another checkpoint: .*parameters_sha256 abababababab, now cdcd.*--out, or --again",
        ):
            results.to_measure(found, of, again=(), out=tmp_path)
    limited = {name: one | {"limit": 5} for name, one in asked.items()}
    with pytest.raises(UserError, match=r"is of other settings: limit 0, now 5\."):
        results.to_measure(found, limited, again=(), out=tmp_path)
    assert results.to_measure(found, {"piqa": limited["piqa"]}, again=(), out=tmp_path) == ["piqa"]


def test_the_tables(tasks):
    """The paper's metric and number of examples count; a group has its own row; an average needs every column."""
    from seqjax.evals.lm_eval import table

    found = {
        "copa": result("copa", 0.75),
        "arc_easy": result("arc_easy", 0.5, metric="acc_norm"),
        "boolq": result("boolq", 0.6, shots=5),
        "sciq": result("sciq", 0.9, metric="acc_norm", limit=10),
        "mmlu": result("mmlu_a", 0.2, shots=5)
        | {"groups": {"mmlu": {"acc,none": 0.25, "acc_stderr,none": 0.1}}, "group_subtasks": {"mmlu": ["mmlu_a"]}},
        "mine": result("mine", 1e9, metric="perplexity"),
    }
    page = table.markdown(found, name="runs/x")
    assert "| mmlu | acc | 0.2500 | 0.1000 | 100 | 5 |" in page and "mmlu_a" not in page
    assert "| mine | perplexity | 1.000e+09 | 0.0100 | 100 | 0 |" in page
    assert "**Not all documents of sciq (--limit): these numbers compare with none.**" in page
    own = next(line for line in page.splitlines() if line.startswith("| **runs/x**"))
    assert own == "| **runs/x** | 25.00 |  | 50.00 |  |  |  |  |  |  | 75.00 |  |  |  |  |"
    assert "table 1 of the paper" not in page
    every = {t.name: result(t.name, 0.5, metric=t.metric, shots=t.fewshot) for t in tasks.PAPER}
    page = table.markdown(every, name="runs/x")
    assert page.count("| 50.00 |") and "| **runs/x** | 50.00 | 50.00 | 50.00 | 50.00 |\n" in page
    assert "| Mamba-1 | 36.09 | 31.03 | 6.44 | 24.52 |" in page


def test_the_papers_averages():
    """Those that it prints itself, which nobody typed into the module."""
    extras.need("lm_eval")
    from seqjax.evals.lm_eval import table

    printed = (50.43, 49.84, 50.68, 49.89, 49.30, 50.72, 49.90)
    rows = table.PUBLISHED[2].values()
    assert [round(sum(row) / len(row), 2) for row in rows] == pytest.approx(printed, abs=0.011)


def test_local_tasks_ask_for_the_text_as_it_stands(corpus_cache, tasks):
    """A context and its right continuation are a piece of a held-out text, white space and all."""
    import lm_eval
    from lm_eval.api.model import LM

    from seqjax.evals.lm_eval.local import data

    asked = []

    class Recorder(LM):
        def loglikelihood(self, requests):
            asked.extend(request.args for request in requests)
            return [(-1.0, False)] * len(requests)

        def generate_until(self, requests):
            raise NotImplementedError

        loglikelihood_rolling = generate_until

    for task, right in (("local_continuation", lambda i: i // 4 % 4 == i % 4), ("local_last_word", lambda i: True)):
        asked.clear()
        manager = tasks.manager([task], [], cache_dir=corpus_cache)
        lm_eval.simple_evaluate(model=Recorder(), tasks=[task], task_manager=manager, limit=8, bootstrap_iters=0)
        texts = data.held_out(corpus_cache)
        if task == "local_last_word":  # its passages have one space for any white space
            texts = [" ".join(text.split()) for text in texts]
        wholes = [context + target for i, (context, target) in enumerate(asked) if right(i)]
        assert len(wholes) == 8 and all(any(whole in text for text in texts) for whole in wholes), task


@pytest.mark.slow
def test_local_tasks_on_a_run(blocks_dir, corpus_cache, tmp_path, capsys):
    """A random model, twice: the second time nothing is measured, and another checkpoint is refused."""
    config = support.run_config(blocks_dir, "rwkv7", data__cache_dir=corpus_cache, train__seq_len=128)
    write_checkpoint(tmp_path, config, 3)
    argv = [f"--workdir={tmp_path}", "--tasks=local", "--limit=6"]
    command.main(argv)
    first = capsys.readouterr().out
    assert first.count("of 6\n") == 8 and first.endswith(f"{tmp_path}/harness/table.md has them all.\n")
    written = json.loads((tmp_path / "harness" / "local_copy.json").read_text())
    assert written["config"]["model"] == "SeqjaxLM" and written["versions"] == {"local_copy": 1.0}
    assert written["seqjax"]["step"] == 3 and len(written["seqjax"]["texts"]) == 64
    bits = json.loads((tmp_path / "harness" / "local_bits_per_byte.json").read_text())["results"]
    assert 7 < bits["local_bits_per_byte"]["bits_per_byte,none"] < 9, "a model that knows nothing, of 258 tokens"
    command.main(argv)
    assert capsys.readouterr().out == first.replace("of 6\n", "of 6  (measured before)\n")
    write_checkpoint(tmp_path, config, 4)
    with pytest.raises(UserError, match="is of another checkpoint: step 3, now 4"):
        command.main(argv)
    command.main([*argv, "--again", "--tasks=local_last_word", f"--out={tmp_path / 'other'}"])
