"""Every config file through the commands: train two steps, evaluate the checkpoint, generate from it.

Generation uses the mixer's cache, so it is compared with the parallel form token by token.
"""

import importlib
import json

import pytest

from seqjax.commands import evaluate, generate
from seqjax.config import from_config_dict
from seqjax.training import metrics
from seqjax.training.loop import train
from tests import support
from tests.end_to_end.greedy import greedy

N_NEW = 20
FILES = [p for folder in ("configs", "configs/ablations") for p in sorted((support.ROOT / folder).glob("*.py"))]
CONFIGS = [
    ".".join(path.relative_to(support.ROOT / "configs").with_suffix("").parts)
    for path in FILES
    if path.stem != "__init__"
]


def check_commands(workdir, config, prompt, capsys):
    """Run `seqjax.evaluate` and `seqjax.generate` on a finished run."""
    evaluate.main([f"--workdir={workdir}"])
    written = json.loads((workdir / "evaluation.json").read_text())
    last = [r for r in metrics.read(workdir) if "eval/c4/loss" in r][-1]
    assert written["step"] == last["step"] == config.train.steps
    assert len(written["loss"]) == 5
    for domain, loss in written["loss"].items():
        assert loss == pytest.approx(last[f"eval/{domain}/loss"], rel=1e-6)
    capsys.readouterr()
    generate.main([f"--workdir={workdir}", f"--prompt={prompt}", f"--max_new_tokens={N_NEW}", "--temperature=0"])
    want, margins = greedy(workdir, prompt, N_NEW)
    assert capsys.readouterr().out == prompt + want + "\n"
    assert min(margins) > 0, "a tie: either token would be right"


@pytest.mark.slow  # test_train.py covers one config
@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_of_every_config_is_evaluated_and_generated_from(name, blocks_dir, tmp_path, capsys):
    # Position tables end at 32, just above BOS + 7 + 20 tokens, so nearly all absolute positions are used.
    overrides = {"train__steps": 2, "eval__every": 0, "checkpoint__every": 0, "log__sample_tokens": 200}
    values = importlib.import_module(f"configs.{name}").get_config("debug")
    settings = support.run_settings(blocks_dir, **overrides)
    values.update_from_flattened_dict({k: v for k, v in settings.items() if not k.startswith("model.")})
    if name == "moba":
        values.model.mixer.chunk_size = 8  # selects two past chunks
    config = from_config_dict(values)
    assert train(config, tmp_path / "run") is True
    assert "A sample" in (tmp_path / "run" / "report.md").read_text()
    check_commands(tmp_path / "run", config, "qwerty ", capsys)
