"""List the paper's tasks with metrics and few-shot counts, and seqjax's own.

Columns are named as in tables 1 and 2 in arXiv 2505.18522, and tasks as in lm-evaluation-harness 0.4.13. The paper does
not state its harness version, so prompts may differ.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.tasks import TaskManager

from seqjax.errors import UserError, nearest

LOCAL = Path(__file__).parent / "local"


class PaperTask(NamedTuple):
    """One column of a table in the paper."""

    table: int
    column: str
    name: str  # task name in lm-evaluation-harness
    metric: str
    fewshot: int = 0  # examples before a question


PAPER = (
    PaperTask(2, "MMLU", "mmlu", "acc", 5),
    PaperTask(2, "OBQA", "openbookqa", "acc_norm"),
    PaperTask(2, "ARC-e", "arc_easy", "acc_norm"),
    PaperTask(2, "ARC-c", "arc_challenge", "acc_norm"),
    PaperTask(2, "BoolQ", "boolq", "acc"),
    PaperTask(2, "RACE", "race", "acc"),
    PaperTask(2, "SIQA", "social_iqa", "acc"),
    PaperTask(2, "SCIQ", "sciq", "acc_norm"),
    PaperTask(2, "HellaSwag", "hellaswag", "acc_norm"),
    PaperTask(2, "COPA", "copa", "acc"),
    PaperTask(2, "PIQA", "piqa", "acc_norm"),
    PaperTask(2, "WinoGrande", "winogrande", "acc"),
    PaperTask(2, "WSC", "wsc273", "acc"),
    PaperTask(1, "SWDE", "swde", "contains"),
    PaperTask(1, "SQuAD", "squad_completion", "contains"),
    PaperTask(1, "FDA", "fda", "contains"),
)
LOCAL_TASKS = ("local_continuation", "local_last_word", "local_copy", "local_bits_per_byte")
GROUPS = {"paper": tuple(task.name for task in PAPER), "local": LOCAL_TASKS}


class Manager(TaskManager):
    """lm_eval's task manager, with errors that state the task and the fix."""

    def load(self, task_list: Any) -> Any:
        """Load tasks with their data.

        Raises `UserError` if a task or its data cannot be loaded.
        """
        try:
            return super().load(task_list)
        except UserError:
            raise
        except Exception as error:
            task_text = ", ".join(map(str, task_list)) if isinstance(task_list, list) else str(task_list)
            message = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"{task_text}: the task or its data could not be loaded ({type(error).__name__}: {message[:300]}). "
                "Harness tasks download data from the Hugging Face hub: repeat the command with a network connection "
                "or with a cache downloaded elsewhere (HF_HOME); it resumes with this task."
            ) from error


def expanded(requested: Sequence[str]) -> list[str]:
    """Replace `paper` and `local` with their task names, and remove duplicates."""
    return list(dict.fromkeys(name for word in requested for name in GROUPS.get(word, (word,))))


def fewshot_of(name: str, requested: int | None) -> int | None:
    """Return `requested`, or the paper's number of few-shot examples.

    None selects the task's default.
    """
    if requested is not None:
        return requested
    return next((task.fewshot for task in PAPER if task.name == name), None)


def manager(names: Sequence[str], include: Sequence[Path], *, cache_dir: str = "") -> Manager:
    """Return a task manager that knows all `names`.

    lm_eval's own tasks are read (6 s) only if needed.

    Args:
        names: Task names.
        include: Directories with YAML tasks.
        cache_dir: Directory of the built-in corpus; "" = the default.

    Raises `UserError` for a missing directory and for an unknown name.
    """
    for directory in include:
        if not directory.is_dir():
            raise UserError(f"--include={directory} is not a directory; give a directory with YAML tasks.")
    options: dict[str, Any] = {"include_path": [LOCAL, *include]}
    if cache_dir:
        options["metadata"] = {"seqjax_cache_dir": cache_dir}
    task_manager = Manager(include_defaults=False, **options)
    if not {*names} <= {*task_manager.all_tasks}:
        task_manager = Manager(include_defaults=True, **options)
    for name in names:
        if name not in task_manager.all_tasks:
            known = [*GROUPS, *LOCAL_TASKS, *(task.name for task in PAPER)]
            raise UserError(f"--tasks: there is no task {name!r}.{nearest(name, known)} `lm-eval ls tasks` lists all.")
    return task_manager
