"""A run resumes on another number of devices: the same batches, split differently, with equal losses up to rounding.

Sums are taken in another order, which changes a float32 loss by less than the relative error `NOISE`.
"""

import contextlib
import functools
import io
import itertools
import re
import shutil

import jax
import pytest

from seqjax.errors import UserError
from seqjax.sharding import make_mesh
from seqjax.training import dry_run
from seqjax.training import loop as train_module
from seqjax.training.loop import train
from tests import support

STEPS, MIDDLE, BATCH = 8, 4, 8
NOISE = 1e-5


def run_on(monkeypatch, n_devices, blocks_dir, workdir, **overrides) -> set[tuple[int, ...]]:
    """Start or resume the run on this number of devices; return the token shapes of its steps.

    Each device's share of the state and of a batch must equal the shares in the text of `--dry_run`.
    """
    config = support.run_config(
        blocks_dir,
        "transformer_pp",
        **{
            "train__steps": STEPS,
            "train__batch_size": BATCH,
            "train__per_device_batch_size": 2,
            "checkpoint__every": MIDDLE,
            "eval__every": 0,
        }
        | overrides,
    )
    shapes, held = set(), {}
    place, save = train_module.to_devices, train_module.Checkpoints.save

    def seen_place(batch, sharding):
        placed = place(batch, sharding)
        if placed.ndim:  # not the learning rate
            shapes.add(placed.shape)
            held["batch"] = support.bytes_held(placed)
        return placed

    def seen_save(self, step, state, *rest):
        held["state"] = support.bytes_held(state)
        save(self, step, state, *rest)

    devices = jax.devices()[:n_devices]
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "make_mesh", functools.partial(make_mesh, devices=devices))
        patch.setattr(train_module, "to_devices", seen_place)
        patch.setattr(train_module.Checkpoints, "save", seen_save)
        assert train(config, workdir) is True
    said = {}
    for line in dry_run.describe(config, None, devices):
        if found := re.match(r"(state|batch) +([\d,]+) bytes on each device", line):
            said[found[1]] = {int(found[2].replace(",", ""))}
        if said.keys() == held.keys():  # compiled from here on
            break
    assert held == said
    return shapes


@pytest.fixture(scope="module")
def one_device(blocks_dir, tmp_path_factory):
    """Finish a run on one device, in four micro-batches per step. It prints no table of shards."""
    workdir = tmp_path_factory.mktemp("devices") / "run"
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        assert run_on(patch, 1, blocks_dir, workdir) == {(4, 2, support.SEQ_LEN + 1)}
    assert "Each step: 4 micro-batches of 2 sequences, 2 on each device" in said.getvalue()
    assert "mixer.{k,q,v}" not in said.getvalue()
    return workdir


@pytest.fixture
def midway(one_device, tmp_path):
    """Return a copy of it at an intermediate checkpoint."""
    workdir = shutil.copytree(one_device, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints" / str(STEPS))
    return workdir


DIVIDED = [  # mesh, micro-batches
    ({"fsdp": 2}, 2),
    ({"data": 2, "fsdp": 2}, 1),
    ({"data": 4, "tensor": 2}, 1),
    ({"data": 8}, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "n_micro"), DIVIDED)
def test_resume_on_another_number_of_devices(mesh, n_micro, blocks_dir, one_device, midway, monkeypatch, capsys):
    n_devices = mesh.get("data", 1) * mesh.get("fsdp", 1) * mesh.get("tensor", 1)
    settings = {f"mesh__{axis}": n for axis, n in mesh.items()}
    shapes = run_on(monkeypatch, n_devices, blocks_dir, midway, **settings)
    assert shapes == {(n_micro, BATCH // n_micro, support.SEQ_LEN + 1)}
    got, want = support.rows(midway), support.rows(one_device)
    assert [row["step"] for row in got] == [row["step"] for row in want] == [*range(1, STEPS + 1), STEPS]
    assert got[:MIDDLE] == want[:MIDDLE]
    for row, other in zip(got, want, strict=True):
        assert row == pytest.approx(other, rel=NOISE)
    assert got[MIDDLE:] != want[MIDDLE:], "other devices did the same sums"
    losses = [row["train/loss"] for row in want[:STEPS]]
    assert min(abs(a / b - 1) for a, b in itertools.pairwise(losses)) > 50 * NOISE, "another batch would not show"
    said = capsys.readouterr().err
    assert said.count("blocks.*.mixer.{k,q,v}.w x2") == 1, "the table, once"


def test_device_counts_that_cannot_split_the_batch_leave_the_run_unchanged(blocks_dir, midway, monkeypatch):
    before = support.rows(midway)
    with pytest.raises(UserError, match=r"batch_size=8 sequences.*data=3.*The nearest that fit are 6 and 9\."):
        run_on(monkeypatch, 3, blocks_dir, midway)
    assert support.rows(midway) == before
    assert support.checkpoint_steps(midway) == [MIDDLE]
