"""`seqjax recall`: training, counting, results and the report."""

import dataclasses
import itertools
import json
import math
import shlex
import shutil
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from seqjax.config import OptimConfig
from seqjax.errors import UserError
from seqjax.evals.recall import __main__ as command
from seqjax.evals.recall import report, setups, train
from seqjax.evals.recall.setups import Setup
from seqjax.evals.recall.tasks import IGNORED, Batch, Examples, TaskSetup
from seqjax.evals.recall.tasks.capacity import Capacity
from seqjax.evals.recall.tasks.s5 import S5
from seqjax.evals.recall.tasks.toposort import TopoSort
from seqjax.mixers import _registry
from seqjax.models import Model
from seqjax.training.origin import RULES
from seqjax.training.schedule import optimizer as make_optimizer
from tests import support
from tests.pictures import assert_readable, overlapping


@pytest.fixture
def tiny(monkeypatch) -> Setup:
    """Replace the size `demo` by one task with two steps."""
    task = TaskSetup(steps=2, train=(S5(length=4),), tests={"4": S5(length=4), "6": S5(length=6)}, own="4")
    rounds = ((32, 1e-3), (32, 2e-3))
    setup = Setup(batch_size=2, rounds=rounds, test_sequences=4, steps_per_call=1, tasks=(task,))
    monkeypatch.setitem(setups.SETUPS, "demo", setup)
    return setup


def test_measure_counts_answers_at_targets_only() -> None:
    class Fixed(Model):
        """Predicts id 1 everywhere."""

        def logits(self, params, tokens_BT, positions_BA=None):
            assert positions_BA is not None
            return jax.nn.one_hot(jnp.ones_like(positions_BA), 3)

    targets = np.array([[1, IGNORED, 1], [1, 2, IGNORED]])
    batch = train.batch(Examples(np.zeros((2, 3), np.int32), targets), 2)
    model = Fixed(train.model_config("transformer_pp", dim=32, vocab_size=3), max_len=3)
    answers = train.make_answers(model)
    guesses, bits = answers({}, batch)
    assert guesses.tolist() == [[1, 1], [1, 1]]
    likely, unlikely = np.log2((math.e + 2) / math.e), np.log2(math.e + 2)
    np.testing.assert_allclose(bits, [[likely, likely], [likely, unlikely]], rtol=1e-6)
    measured = train.measure(answers, {}, S5(length=3), itertools.repeat(batch), sequences=3, parameters=7)
    expected = {"accuracy": 3 / 4, "whole": 1 / 2, "bits": (3 * likely + unlikely) / 4}
    assert measured == pytest.approx(expected, rel=1e-6)  # S5 has no score
    single = batch._replace(targets=np.array([[1, IGNORED], [IGNORED, IGNORED]]))
    np.testing.assert_allclose(answers({}, single)[1], [[likely, 0], [0, 0]], rtol=1e-6)
    task = Capacity(length=8, people=50, among=25)
    measured = train.measure(answers, {}, task, itertools.repeat(single), sequences=2, parameters=50)
    expected = {"accuracy": 1, "whole": 1, "bits": likely, "score": 2 * (6 - likely)}
    assert measured == pytest.approx(expected, rel=1e-6)
    # Node 0 has the parents 1 and 2, and the drawn order is 2, 1, 0. Id 1 is valid first and second, then only 0.
    graph = Batch(np.array([[1, 0, 2, 0, 3, 0, 2, 1]]), np.array([[5, 6, 7]]), np.array([[2, 1, 0]]))
    task = TopoSort(length=10, shortest=2, longest=3, ids=3)
    measured = train.measure(answers, {}, task, itertools.repeat(graph), sequences=1, parameters=1)
    assert measured["accuracy"] == pytest.approx(2 / 3) and measured["whole"] == 0


def test_validation_test_and_training_sequences_are_disjoint(monkeypatch) -> None:
    """Validation and test sequences from `_tested`, and the training sequences of eight seeds."""
    test = S5(length=12, moved=5)
    task = TaskSetup(steps=2, train=(test,), tests={"own": test, "long": S5(length=16)}, own="own")
    setup = Setup(batch_size=8, rounds=((32, 1e-3),), test_sequences=32, steps_per_call=1, tasks=(task,))
    model = Model(train.model_config("transformer_pp", dim=32, vocab_size=120), max_len=16)
    drawn: list[set[bytes]] = []

    def measured(answers, params, task, stream, *, sequences, parameters):
        drawn.append({row.tobytes() for _ in range(4) for row in next(stream).inputs[:, : task.length]})
        return {"accuracy": 0.0}

    monkeypatch.setattr(train, "measure", measured)
    train._tested(None, {}, task, setup, model)
    tested, _, validation = drawn
    assert len(tested) == len(validation) == 32
    assert not tested & validation
    seeds: list[int] = []

    def recorded(tasks, *, batch_size, seed, **lengths):
        seeds.append(seed)
        if len(seeds) == 8:
            raise ZeroDivisionError
        return iter(())

    batches = train.batches
    monkeypatch.setattr(train, "batches", recorded)
    with pytest.raises(ZeroDivisionError):
        train.train("transformer_pp", task, setup, dim=32, runs=[(1e-3, seed) for seed in range(8)])
    assert len(set(seeds)) == 8
    for seed in seeds:
        stream = batches([test], batch_size=8, seed=seed)
        trained = {row.tobytes() for _ in range(4) for row in next(stream).inputs}
        assert not trained & (tested | validation)


def test_loss_counts_answers_only() -> None:
    model = Model(train.model_config("transformer_pp", dim=32, vocab_size=120), max_len=8)
    params = jax.jit(model.init)(jax.random.key(0))
    inputs, targets = S5(length=4).examples(np.random.default_rng(0), 2)
    targets[:, :3] = IGNORED
    batch = train.batch(Examples(inputs, targets), 2)
    assert batch.positions.tolist() == [[3, 0], [3, 0]]
    assert batch.targets.tolist() == [[t, IGNORED] for t in targets[:, 3]]
    inputs, weights = jnp.asarray(inputs), jnp.asarray(batch.targets != IGNORED, jnp.float32)
    answers = jnp.maximum(batch.targets, 0)
    positions = jnp.asarray(batch.positions)
    total, count = jax.jit(model.target_loss)(params, inputs, answers, weights, positions_BA=positions)
    logits_of = jax.jit(model.logits)
    logits = logits_of(params, inputs)[:, 3]
    np.testing.assert_allclose(logits_of(params, inputs, jnp.full((2, 1), 3))[:, 0], logits, rtol=1e-5, atol=1e-6)
    log_p = jax.nn.log_softmax(logits)
    assert count == 2
    np.testing.assert_allclose(total, -(log_p[0, targets[0, 3]] + log_p[1, targets[1, 3]]), rtol=1e-5)


@pytest.mark.slow
def test_training_does_not_depend_on_steps_per_call() -> None:
    model = Model(train.model_config("transformer_pp", dim=32, vocab_size=120), max_len=8)
    optimizer = make_optimizer(OptimConfig())
    stream = train.batches([S5(length=4)], batch_size=2, seed=0)
    drawn, ends = [next(stream) for _ in range(4)], {}
    steps = train.make_steps(model, optimizer)
    for k in (1, 2, 4):
        params = jax.vmap(model.init)(jax.random.key(0)[None])
        opt_state, losses = jax.vmap(optimizer.init)(params), []
        for i in range(0, 4, k):
            together = jax.tree.map(lambda *arrays: np.stack(arrays)[None], *drawn[i : i + k])
            params, opt_state, losses_NK = steps(params, opt_state, np.full((1, k), 1e-2, np.float32), together)
            losses += losses_NK[0].tolist()
        ends[k] = (losses, params)
    assert ends[2][0] == ends[4][0] and len(set(ends[4][0])) == 4
    jax.tree.map(np.testing.assert_array_equal, ends[2][1], ends[4][1])
    # XLA unrolls a loop with one step and fuses it differently.
    np.testing.assert_allclose(ends[1][0], ends[4][0], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["transformer_pp", "gated_deltanet", "mamba1"])
def test_runs_in_one_program_equal_single_runs(tiny, text) -> None:
    """At three rates and two seeds; summation order may change last bits, which five steps propagate."""
    setup = dataclasses.replace(tiny, steps_per_call=2)
    task = dataclasses.replace(tiny.tasks[0], steps=5)
    runs = [(1e-3, 0), (2e-3, 1), (3e-3, 0)]
    together = train.train(text, task, setup, dim=32, runs=runs)
    separate = [train.train(text, task, setup, dim=32, runs=[run])[0] for run in runs]
    for got, want in zip(together, separate, strict=True):
        assert (got["together"], want["together"]) == (3, 1)
        assert (got["rate"], got["seed"], got["state"]) == (want["rate"], want["seed"], want["state"])
        np.testing.assert_allclose(got["curve"], want["curve"], rtol=1e-5)
        for name, test in (*got["tests"].items(), ("own", got["validation"])):
            expected = want["validation"] if name == "own" else want["tests"][name]
            assert test == pytest.approx(expected, rel=1e-4), name
        assert got["validation"] != got["tests"]["4"]  # other sequences
    assert len({str(result["curve"]) for result in together}) == 3


def test_groups_keep_the_order_of_their_first_runs() -> None:
    first = list(command._runs(setups.SETUPS["small"], ["Based", "Mamba-2"], ["mqar"]))
    runs = first + [run._replace(seed=1) for run in first]
    assert command._groups(runs, 1) == [[run] for run in runs]
    groups = command._groups(runs, 4)
    assert [(group[0][:3], len(group)) for group in groups] == [
        ((model, "mqar", dim), 4) for dim in (128, 64) for model in ("Based", "Mamba-2")
    ] + [((model, "mqar", dim), 2) for dim in (128, 64) for model in ("Based", "Mamba-2")]
    assert [(run.rate, run.seed) for run in groups[0]] == [(3.2e-3, 0), (1e-3, 0), (1e-2, 0), (3.2e-3, 1)]
    assert sorted(itertools.chain(*groups)) == sorted(runs)


@pytest.mark.slow
def test_results_are_saved_reused_and_reported(tiny, tmp_path, capsys) -> None:
    command.main(["--size=demo", "--models=Transformer++", f"--out={tmp_path}"])
    result, second = report.results(tmp_path)
    assert [(r["task"], r["dim"], r["rate"]) for r in (result, second)] == [("s5", 32, 1e-3), ("s5", 32, 2e-3)]
    assert result["model"] == "Transformer++" and set(result["tests"]) == {"4", "6"}
    assert all(0 < test["bits"] < 12 for test in result["tests"].values())
    # Two layers store a key and a value of width 32 per token.
    assert result["state"] == {"4": 2 * 2 * 32 * 4, "6": 2 * 2 * 32 * 6}
    written = (tmp_path / "report.md").read_text()
    assert "| Transformer++ | 32 | 512 |" in written and report.BITS in written
    assert (tmp_path / "accuracy.png").stat().st_size > 5000
    capsys.readouterr()
    command.main(["--size=demo", "--models=Transformer++", f"--out={tmp_path}"])
    assert "Transformer++" not in capsys.readouterr().out  # no run is repeated
    command.main(["--size=demo", "--models=Transformer++", "--seeds=2", f"--out={tmp_path}"])
    *_, third = every = report.results(tmp_path)
    assert [r["seed"] for r in every] == [0, 0, 1] and third["curve"] not in (result["curve"], second["curve"])
    assert third["rate"] == report.validated_rate([result, second], "4", "accuracy")


def untrained(*_: Any, dim: int, runs: list[tuple[float, int]]) -> list[dict[str, Any]]:
    """Replace `train`: return results without tests."""
    return [{"rate": rate, "dim": dim, "seed": seed, "tests": {}, "seconds": 0} for rate, seed in runs]


def test_results_with_other_settings_are_refused(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(command, "train", untrained)
    command._train(tiny, list(command._runs(tiny, ["Based"], ["s5"])), tmp_path, until=math.inf)
    command.require_same_settings(tiny, tmp_path)
    longer = dataclasses.replace(tiny, tasks=(dataclasses.replace(tiny.tasks[0], train=(S5(length=5),)),))
    match = r"runs\.jsonl .* s5 .*--size.*--out"
    with pytest.raises(UserError, match=match):
        command.require_same_settings(longer, tmp_path)
    with pytest.raises(UserError, match=match):
        command.main(["--size=small", f"--out={tmp_path}"])
    with pytest.raises(UserError, match=match):
        command.require_same_settings(dataclasses.replace(tiny, tasks=()), tmp_path)


def test_truncated_result_line_is_refused(tiny, tmp_path) -> None:
    line = json.dumps(untrained(dim=8, runs=[(0.1, 0)])[0] | {"model": "Based", "task": "s5", "asked": ""})
    (tmp_path / "runs.jsonl").write_text(line + '\n{"task": "s')
    with pytest.raises(UserError, match=r"runs\.jsonl: line 2 .*JSON"):
        command.main(["--size=demo", f"--out={tmp_path}"])


@pytest.mark.parametrize("out", ["file", "gs://bucket/recall"])
def test_out_must_be_a_local_directory(tmp_path, monkeypatch, out) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"^--out={out}"):
        command.main(["--size=demo", f"--out={out}", "--report"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_report_without_results_is_refused(tmp_path) -> None:
    (tmp_path / "runs.jsonl").touch()
    with pytest.raises(UserError, match=r"runs\.jsonl .*--report"):
        command.main(["--size=demo", f"--out={tmp_path}", "--report"])


@pytest.mark.parametrize("key", ["model", "seed", "tests", "tests.4", "state", "state.4", "chance", "device", "steps"])
def test_missing_result_key_is_refused(tmp_path, key) -> None:
    """Keys that the command reads, and keys that only the report reads."""
    setup, task = setups.SETUPS["demo"], "s5"
    tests = {name: {"accuracy": 0.5, "whole": 0.5} for name in setup.task(task).tests}
    value = result(1e-3, easy=0, hard=0) | {
        "task": task,
        "asked": setup.settings_hash(task),
        "seed": 0,
        "tests": tests,
        "chance": 0.1,
    }
    value |= {"state": dict.fromkeys(tests, 8), "device": "cpu", "steps": 1, "batch_size": 2}
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(value) + "\n")
    command.main(["--size=demo", f"--out={tmp_path}", "--report"])
    outer, _, inner = key.partition(".")
    (value[outer] if inner else value).pop(next(iter(tests)) if inner else outer)
    path.write_text(json.dumps(value) + "\n")
    with pytest.raises(UserError, match=rf"runs\.jsonl: line 1: {outer}.* missing"):
        command.main(["--size=demo", f"--out={tmp_path}", "--report"])


def test_all_models_run_before_the_next_width_and_rate() -> None:
    runs = list(command._runs(setups.SETUPS["small"], ["Based", "Mamba-2"], ["mqar", "s5"]))
    assert [run[:2] for run in runs[:4]] == [("Based", "mqar"), ("Mamba-2", "mqar"), ("Based", "s5"), ("Mamba-2", "s5")]
    assert len({run[2:4] for run in runs[:4]}) == 1 and runs[4][2:4] != runs[3][2:4]
    assert len({*runs}) == len({command._claim(run) for run in runs}) == len(runs)


def test_runs_are_claimed_once_and_not_after_the_deadline(tiny, tmp_path, monkeypatch, capsys) -> None:
    trained = []
    monkeypatch.setattr(
        command, "train", lambda *a, **settings: trained.append(settings["runs"]) or untrained(**settings)
    )
    runs = list(command._runs(tiny, ["Based"], ["s5"]))
    command._train(tiny, runs, tmp_path, until=0, claims=tmp_path)
    assert trained == []
    (tmp_path / command._claim(runs[0])).touch()  # claimed by another process
    command._train(tiny, runs, tmp_path, until=math.inf, claims=tmp_path)
    assert trained == [[(2e-3, 0)]]
    assert "(1 of 2 left," in capsys.readouterr().out
    command._train(tiny, runs, tmp_path, until=math.inf)
    assert trained == [[(2e-3, 0)], [(1e-3, 0)]]  # finished runs are not repeated
    trained.clear()
    runs += [run._replace(seed=1) for run in runs]
    (tmp_path / command._claim(runs[3])).touch()
    command._train(tiny, runs, tmp_path, until=math.inf, together=4, claims=tmp_path)
    assert trained == [[(1e-3, 1)]]  # the unclaimed runs of the group


def test_failed_process_is_replaced(tmp_path, monkeypatch) -> None:
    def start(arguments, claims, *, until, slot, jobs):
        # Instead of training, claim the unclaimed runs in order and write their results; seed 1 fails.
        script = (
            "import json, pathlib, sys; out, claims = map(pathlib.Path, sys.argv[1:])\n"
            "for seed in range(3):\n"
            "    try: (claims / f'Based_s5_32_0.001_{seed}').touch(exist_ok=False)\n"
            "    except FileExistsError: continue\n"
            "    if seed == 1: sys.exit('seed 1 is broken')\n"
            "    run = dict(model='Based', task='s5', dim=32, rate=1e-3, seed=seed, asked='', seconds=1, tests={})\n"
            "    with (out / 'runs.jsonl').open('a') as file: print(json.dumps(run), file=file)\n"
        )
        return subprocess.Popen([sys.executable, "-c", script, str(tmp_path), claims])

    monkeypatch.setattr(command, "_start", start)
    runs = [command.Run("Based", "s5", 32, 1e-3, seed) for seed in range(3)]
    assert command._in_processes([], runs, tmp_path, until=math.inf, jobs=1) == 1
    assert command._done(tmp_path) == {runs[0], runs[2]}


def result(rate: float, *, easy: float, hard: float, seconds: float = 1.0) -> dict:
    """Return a run's result with two tests."""
    tests = {name: {"accuracy": share, "whole": share / 2} for name, share in (("easy", easy), ("hard", hard))}
    return {"model": "Based", "dim": 32, "rate": rate, "seed": 0, "tests": tests, "seconds": seconds}


def test_best_rate_uses_the_given_test() -> None:
    results = [result(1e-3, easy=0.2, hard=0.8), result(2e-3, easy=0.7, hard=0.3), result(3e-3, easy=0.4, hard=0.6)]
    best = report.best_rate(results, "easy")
    assert (best["rate"], best["tried"], best["runs"]) == (2e-3, 3, 1)
    assert report.best_rate(results, "hard")["rate"] == 1e-3
    assert report._cell(best["tests"]["easy"]) == "70.0 (35.0)"


def test_rates_are_compared_on_shared_seeds() -> None:
    lines = [result(1e-3, easy=0.6, hard=0.5), result(2e-3, easy=0.7, hard=0.9)]
    lines += [result(2e-3, easy=0.1, hard=0.1) | {"seed": seed} for seed in (1, 2)]
    best = report.best_rate(lines, "easy")
    assert (best["rate"], best["runs"], best["tried"]) == (2e-3, 3, 2)
    assert report.validated_rate(lines, "easy", "accuracy") == 2e-3
    validated = [line | {"validation": {"accuracy": 0.5, "bits": line["rate"]}} for line in lines]
    assert report.validated_rate(validated, "easy", "accuracy") == 1e-3  # fewer bits break the tie


def test_runs_at_one_rate_are_shown_as_mean_and_range() -> None:
    once = result(1e-3, easy=0.705, hard=0.5)
    twice = [result(2e-3, easy=0.7, hard=0.1, seconds=3), result(2e-3, easy=0.706, hard=0.3)]
    # The first rate has the better mean.
    assert report.best_rate([once, *twice], "easy")["rate"] == 1e-3
    best = report.best_rate(twice, "easy")
    assert (best["tried"], best["runs"], best["seconds"]) == (1, 2, (1, 3))
    assert report._cell(best["tests"]["easy"]) == "70.3 (35.1)"
    assert report._cell(best["tests"]["hard"]) == "20.0 [10.0, 30.0]"


def test_score_chooses_the_rate_and_has_a_column(tmp_path, monkeypatch) -> None:
    """Bits have a column too. A missing score is refused; missing bits are not, because older results have none."""
    monkeypatch.setattr(report, "draw", lambda *_, **__: None)
    setup, name, path = setups.SETUPS["demo"], "capacity", tmp_path / "runs.jsonl"
    task = setup.task(name)
    common = {"task": name, "asked": setup.settings_hash(name), "chance": 0.1, "device": "cpu"}
    common |= {"steps": 1, "batch_size": 2}
    lines = []
    for seed, rate, accuracy, score in (
        (0, 1e-3, 0.9, 1.45),
        (1, 1e-3, 0.9, 1.55),
        (0, 2e-3, 0.95, 1.4),
        (0, 3e-3, 0.99, math.nan),
    ):
        test = {"accuracy": accuracy, "whole": 0.0, "bits": 5 - score, "score": score}
        lines.append(common | {"model": "Based", "dim": 32, "rate": rate, "seed": seed, "seconds": 1.0})
        lines[-1] |= {"state": dict.fromkeys(task.tests, 8), "tests": {name: {**test} for name in task.tests}}

    def reported() -> str:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command.main(["--size=demo", f"--out={tmp_path}", "--report"])
        return (tmp_path / "report.md").read_text()

    assert "| bits per parameter | bits | mean |" in reported()
    assert "| 0.001 (of 3), 2 runs | 90.0 (0.0) | 90.0 (0.0) | 1.5 | 3.5 | 90.0 |" in reported()
    for test in lines[1]["tests"].values():
        del test["bits"]
    assert "| bits per parameter | mean |\n" in reported()  # a run without bits removes the column
    del lines[1]["tests"][task.own]["score"]
    with pytest.raises(UserError, match=rf"line 2: tests\.{task.own}\.score"):
        reported()


@pytest.mark.parametrize(
    ("task", "attention", "failed"),
    [("mqar", 0.4, True), ("mqar", 0.5, False), ("s5", 0.1, False), ("mqar", None, False)],
)
def test_report_states_a_failed_control(task, attention, failed) -> None:
    """Tasks that attention cannot solve, and results without attention, have no control."""
    of_task = setups.SETUPS["demo"].task(task)
    accuracies = {"Mamba-2": 0.9, "Transformer": 0.01, "Transformer++": attention}
    results = {
        label: [{"tests": {of_task.own: {"accuracy": accuracy}}}]
        for label, accuracy in accuracies.items()
        if attention is not None or label == "Mamba-2"
    }
    sentence = report._control(of_task, results)
    assert bool(sentence) == failed
    assert not failed or ("Transformer++" in sentence and "40.0%" in sentence)


@pytest.mark.parametrize("passed", [0.79, 0.8])
def test_report_marks_models_that_fail_the_easiest_test(tiny, passed) -> None:
    task = dataclasses.replace(tiny.tasks[0], easy="4")
    numbers = {"accuracy": 0.9, "whole": 0.9, "accuracy_range": (0.9, 0.9)}
    run = {
        "dim": 32,
        "rate": 1e-3,
        "tried": 1,
        "runs": 1,
        "state": {"4": 8},
        "chance": 0.1,
        "steps": 1,
        "batch_size": 2,
    }
    run |= {"device": "", "seconds": (1.0, 1.0), "tests": {"4": numbers, "6": numbers}}
    fails = run | {"tests": {"4": numbers | {"accuracy": passed}, "6": numbers}}
    table = report._table(task, {"Mamba-2": [run], "Based": [fails]})
    assert "| Mamba-2 | 32 |" in table
    assert ("| Based (not trained) | 32 |" in table) == ("**Not trained:**" in table) == (passed < report.PASSED)
    assert "not trained" not in report._table(tiny.tasks[0], {"Mamba-2": [run], "Based": [fails]}).lower()


def test_settings_hash_depends_on_depth(tiny) -> None:
    deeper = dataclasses.replace(tiny, tasks=(dataclasses.replace(tiny.tasks[0], depth=2, easy="4"),))
    easy = dataclasses.replace(tiny, tasks=(dataclasses.replace(tiny.tasks[0], easy="4"),))
    assert deeper.settings_hash("s5") != tiny.settings_hash("s5") == easy.settings_hash("s5")


GOLDEN = support.ROOT / "tests" / "golden" / "recall"


def test_stored_results_give_the_stored_report(tmp_path, monkeypatch) -> None:
    assert_same_report(GOLDEN, "demo", tmp_path, monkeypatch)


def assert_same_report(directory, size, tmp_path, monkeypatch) -> None:
    """Write the report from stored results, and compare it with the stored report."""
    monkeypatch.setattr(report, "draw", lambda *_, **__: None)
    shutil.copy(directory / report.RESULTS, tmp_path)
    command.main([f"--size={size}", "--report", f"--out={tmp_path}"])
    assert (tmp_path / "report.md").read_bytes() == (directory / "report.md").read_bytes()


def test_picture_has_a_row_per_model(tmp_path, monkeypatch) -> None:
    assert_rows_in_picture(GOLDEN, "demo", tmp_path, monkeypatch)


def assert_rows_in_picture(directory, size, tmp_path, monkeypatch) -> None:
    """Check the picture's rows: sorted by state size, with accuracies and state sizes."""
    figures: list[Any] = []
    monkeypatch.setattr(report.figures, "save", lambda figure, path: figures.append(figure))
    runs = report.results(directory)
    of_tasks = {task.name: of for task in setups.SETUPS[size].tasks if (of := report.by_model(runs, task))}
    tasks = [task for task in setups.SETUPS[size].tasks if task.name in of_tasks]
    report.draw(tmp_path / "accuracy.png", tasks, of_tasks, title="t")
    (figure,) = figures
    assert_readable(figure, categories=True)
    panels = [panel for panel in figure.axes if panel.axison]
    firsts = [panel for panel in panels if panel.get_subplotspec().is_first_col()]
    rows = [[text.get_text() for text in panel.get_yticklabels()] for panel in firsts]
    labels = list(dict.fromkeys(label for row in rows for label in row))
    assert {*labels} == {label for of_task in of_tasks.values() for label in of_task}
    sizes = {
        label: [of_task[label][-1]["state"] for of_task in of_tasks.values() if label in of_task] for label in labels
    }
    assert max(sizes[rows[0][0]][0].values()) < max(sizes[rows[0][-1]][0].values())
    annotations = [text.get_text() for panel in figure.axes for text in panel.texts]
    assert (annotations.count("state"), len(annotations)) == (len(rows), sum(1 + len(row) for row in rows))
    for panel, task in zip(panels, tasks, strict=True):
        by, unit = ("score", 1) if task.kind.score else ("accuracy", 100)
        assert panel.get_xlabel().replace("\n", " ") == (task.kind.score or "right answers (%)")
        assert overlapping(panel.texts) == []
        labels = rows[panel.get_subplotspec().rowspan.start]
        for label, of_model in of_tasks[task.name].items():
            y, last = labels.index(label), of_model[-1]
            shown = [line for line in panel.lines if list(line.get_ydata()) == [y] and line.get_marker() == "o"]
            assert [line.get_xdata()[0] for line in shown] == [unit * last["tests"][task.own][by]]
        marked = {
            round(line.get_ydata()[0]) for line in panel.lines if line.get_marker() == "o" and len(line.get_xdata())
        }
        assert marked == {labels.index(label) for label in of_tasks[task.name]}  # no mark: not run


def test_further_seeds_use_the_best_rate() -> None:
    """They start when the first seed has run at all rates. The score decides if the task has one."""
    setup, models, tasks = setups.SETUPS["small"], ["Based", "Mamba-2"], ["s5", "grammar"]
    first = list(command._runs(setup, models, tasks))
    assert {run.seed for run in first} == {0} and len({*first}) == len(first) == len(models) * len(tasks) * 6

    def finished(run: command.Run) -> dict[str, Any]:
        accuracy = {1e-3: 0.9, 3.2e-3: 0.8, 1e-2: 0.7}[run.rate]
        return run._asdict() | {"validation": {"accuracy": accuracy, "score": -accuracy}}

    absent = command.Run("Mamba-2", "s5", 64, 1e-2, 0)
    results = [finished(run) for run in first if run != absent]
    runs = list(command._runs(setup, models, tasks, seeds=3, finished=results))
    assert runs[: len(first)] == first
    best = {"s5": 1e-3, "grammar": 1e-2}
    kinds = [(model, task, dim) for task in tasks for model in models for dim in (128, 64)]
    kinds.remove(absent[:3])
    assert runs[len(first) :] == [command.Run(*kind, best[kind[1]], seed) for seed in (1, 2) for kind in kinds]


def test_further_seeds_use_the_rate_of_the_report() -> None:
    """A second seed at all rates counts for the choice, as in the report."""
    setup = setups.SETUPS["small"]
    results: list[dict[str, Any]] = []
    for rate, accuracies in {1e-3: (0.7, 0.7), 3.2e-3: (0.9, 0.9), 1e-2: (1.0, 0.2)}.items():
        of_rate = [{"model": "Based", "task": "s5", "dim": 128, "rate": rate, "seed": seed} for seed in (0, 1)]
        results += [run | {"validation": {"accuracy": share}} for run, share in zip(of_rate, accuracies, strict=True)]
    runs = [run for run in command._runs(setup, ["Based"], ["s5"], seeds=3, finished=results) if run.seed]
    assert {run.rate for run in runs} == {3.2e-3} == {report.validated_rate(results, "", "accuracy")}


def test_widths_option_selects_widths(tmp_path, monkeypatch) -> None:
    planned: list[command.Run] = []
    monkeypatch.setattr(command, "_train", lambda setup, runs, out, **_: planned.extend(runs))
    command.main(["--size=small", "--models=Based", "--tasks=s5", "--widths=128", f"--out={tmp_path}"])
    assert [(run.dim, run.rate) for run in planned] == [(128, 3.2e-3), (128, 1e-3), (128, 1e-2)]


def test_results_with_earlier_rules_are_reported_but_not_extended(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(report, "draw", lambda *_, **__: None)
    monkeypatch.setattr(command, "_train", lambda *_, **__: None)
    settings_hash, test = setups.SETUPS["demo"].settings_hash("s5"), {"accuracy": 0.5, "whole": 0.5}
    tests = dict.fromkeys(setups.SETUPS["demo"].task("s5").tests, test)
    line = {"model": "Based", "task": "s5", "asked": settings_hash, "dim": 32, "seed": 0, "rate": 1e-3, "seconds": 1.0}
    line |= {"steps": 1, "batch_size": 2, "chance": 0.1, "device": "cpu"}
    line |= {"state": dict.fromkeys(tests, 8), "tests": tests}
    arguments = ["--size=demo", "--models=Based", "--tasks=s5", f"--out={tmp_path}"]
    (tmp_path / "runs.jsonl").write_text(json.dumps(line) + "\n")
    command.main([*arguments, "--report"])
    assert (tmp_path / "report.md").exists()
    with pytest.raises(UserError, match=r"runs\.jsonl .*rules .*--out.*--report"):
        command.main(arguments)
    (tmp_path / "runs.jsonl").write_text(json.dumps(line | {"rules": RULES}) + "\n")
    command.main(arguments)


def test_foretell_option_prints_the_new_command(tmp_path) -> None:
    arguments = ["--size=small", "--foretell=a b", "--foretell=c", "--models=Based;KDA", f"--out={tmp_path}"]
    with pytest.raises(UserError, match=r"--foretell .*python -m lab\.foretell") as caught:
        command.main(arguments)
    options = shlex.split(str(caught.value).partition("lab.foretell ")[2])
    assert options == ["--size=small", "--models=Based;KDA", f"--out={tmp_path}", "--study=a b", "--study=c"]


@pytest.mark.slow  # compiles the example; the error cases need no training
def test_mixer_in_a_file_is_trained_and_reported(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(_registry, "_registered", {})
    monkeypatch.chdir(tmp_path)
    example = support.page_block("docs/add_a_mixer.md", "class GatedEma(")
    (tmp_path / "gema.py").write_text(example)
    arguments = ["--size=demo", "--models=./gema.py", f"--out={tmp_path}"]
    command.main(arguments)
    (result, _) = report.results(tmp_path)
    assert (result["model"], set(result["mixers"])) == ("./gema.py", {"gema"})
    assert "./gema.py" in (tmp_path / "report.md").read_text()


def test_changed_mixer_file_is_refused(tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(_registry, "_registered", {})
    monkeypatch.chdir(tmp_path)
    line = {"model": "gema.py", "task": "s5", "asked": tiny.settings_hash("s5"), "dim": 32, "seed": 0, "rate": 1e-3}
    line |= {"seconds": 1.0, "tests": {}, "rules": RULES, "mixers": {"gema": "0" * 64}}
    (tmp_path / "runs.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "gema.py").write_text(support.page_block("docs/add_a_mixer.md", "class GatedEma("))
    with pytest.raises(UserError, match=r"runs\.jsonl .* gema\.py .*code"):
        command.main(["--size=demo", "--models=gema.py", f"--out={tmp_path}"])
    with pytest.raises(UserError, match=r"none\.py"):
        command.main(["--size=demo", "--models=none.py", f"--out={tmp_path}"])


def test_labels_may_contain_commas() -> None:
    text = "Transformer++, QK norm,Mamba-2;Top-1 Chunk, exact,Transformer++"
    assert command.labels(text) == ["Transformer++, QK norm", "Mamba-2", "Top-1 Chunk, exact", "Transformer++"]
    assert command.labels("Transformr,x") == ["Transformr", "x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size=demo", "--models=Mamba"], "--models=Mamba "),
        (["--size=demo", "--tasks=mqr"], "--tasks=mqr .*'mqar'"),
        (["--size=large"], "--size=large "),
        (["--size=small", "--widths=128,96"], "--widths=96 "),
        (["--size=demo", "--jobs=0"], "--jobs=0:"),
        (["--size=demo", "--seeds=0"], "--seeds=0:"),
        (["--size=demo", "--together=0"], "--together=0:"),
    ],
)
def test_bad_arguments_are_refused(arguments, message, tmp_path) -> None:
    with pytest.raises(UserError, match=message):
        command.main([*arguments, f"--out={tmp_path}"])


@pytest.mark.slow
def test_rwkv7_learns_to_multiply_permutations(tiny) -> None:
    setup = dataclasses.replace(tiny, batch_size=32, test_sequences=128, steps_per_call=8)
    task = dataclasses.replace(tiny.tasks[0], steps=400, train=(S5(length=2),), tests={"2": S5(length=2)}, own="2")
    (result,) = train.train("rwkv7", task, setup, dim=64, runs=[(3e-3, 0)])
    assert result["tests"]["2"]["accuracy"] > 0.5  # the first of two answers equals the input
