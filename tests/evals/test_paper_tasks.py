"""`seqjax harness --tasks=paper` on stub data: harness tasks run and give the metrics that the tables need.

The stubs have the fields of the real data sets, which need a network.
"""

import json

import pytest

from seqjax.evals.lm_eval import __main__ as command
from tests import extras, support
from tests.end_to_end.conftest import write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ABCD = {"text": ["one", "two", "three", "four"], "label": ["A", "B", "C", "D"]}
PROBLEMS = [{"question": "Which one?", "options": ABCD["text"], "answer": "B"}]
# By data set, or by configuration if tasks share a data set.
ROWS = {
    "cais/mmlu": {"question": "Which?", "subject": "x", "choices": ABCD["text"], "answer": 2},
    "allenai/openbookqa": {"question_stem": "Which", "choices": ABCD, "answerKey": "B"},
    "allenai/ai2_arc": {"question": "Which", "choices": ABCD, "answerKey": "B"},
    "boolq": {"passage": "It is.", "question": "is it", "label": 1},
    "copa": {"premise": "It fell.", "choice1": "It broke.", "choice2": "It flew.", "question": "effect", "label": 0},
    "EleutherAI/race": {"article": "An article.", "problems": repr(PROBLEMS)},
    "lighteval/siqa": {"context": "A", "question": "B?", "answerA": "a", "answerB": "b", "answerC": "c", "label": "2"},
    "allenai/sciq": {
        "support": "S.",
        "question": "Q",
        "distractor1": "a",
        "distractor2": "bb",
        "distractor3": "ccc",
        "correct_answer": "d",
    },
    "Rowan/hellaswag": {"ctx_a": "A", "ctx_b": "b", "activity_label": "L", "endings": ABCD["text"], "label": "1"},
    "baber/piqa": {"goal": "G", "sol1": "first", "sol2": "second", "label": 1},
    "allenai/winogrande": {"sentence": "The _ is big.", "option1": "cat", "option2": "dog", "answer": "1"},
    "lighteval/winograd_wsc": {
        "text": "The cat saw the dog. It ran.",
        "pronoun": "It",
        "pronoun_loc": 21,
        "options": ["The cat", "The dog"],
        "label": 0,
    },
    "hazyresearch/based-swde-v2": {"text": "Name: Anna\nName:", "value": "Anna"},
    "hazyresearch/based-squad": {"text": "Anna sings. The singer is", "value": "Anna"},
    "hazyresearch/based-fda": {"text": "Device: clock\nDevice:", "value": "clock"},
}


@pytest.fixture
def loaded(monkeypatch):
    """Stub all data sets, with six equal rows in every split; return the names that were loaded."""
    datasets = extras.package("datasets")
    extras.need("lm_eval")
    names = []

    def load_dataset(path, name=None, **kwargs):
        names.append((path, name))
        row = ROWS.get(path) or ROWS[name]
        rows = datasets.Dataset.from_list([row] * 6)
        return datasets.DatasetDict(dict.fromkeys(("train", "dev", "validation", "test"), rows))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return names


def test_paper_tasks_fill_both_tables(loaded, blocks_dir, tmp_path, capsys):
    config = support.run_config(blocks_dir, "top1_chunk", train__seq_len=128)
    write_checkpoint(tmp_path, config, 3)
    command.main([f"--workdir={tmp_path}", "--tasks=paper", "--max_length=320"])
    assert len({path for path, _ in loaded}) == 14 and len([p for p, _ in loaded if p == "cais/mmlu"]) == 57
    assert {("allenai/ai2_arc", "ARC-Easy"), ("allenai/ai2_arc", "ARC-Challenge")} <= {*loaded}
    page = (tmp_path / "harness" / "table.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| **")]
    assert [len(row.split("|")) for row in rows] == [17, 7]
    assert not any(cell.strip() == "" for row in rows for cell in row.split("|")[1:-1]), page
    mmlu = json.loads((tmp_path / "harness" / "mmlu.json").read_text())
    assert {*mmlu["n-shot"].values()} == {5} and mmlu["groups"]["mmlu"]["acc,none"] in (0, 1)
    assert "mmlu                     acc" in capsys.readouterr().out
