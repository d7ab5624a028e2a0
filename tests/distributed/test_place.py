"""Which process of a run this one is, and what is refused before any of them waits for another."""

import pytest

from seqjax import main
from seqjax.distributed.place import Place, find_place
from seqjax.errors import UserError

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
}
JAX = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:99", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
NAMES = ("JAX_LOCAL_DEVICE_IDS", "JAX_COORDINATOR_PORT", *SLURM, *JAX)


@pytest.fixture
def place(monkeypatch):
    """`find_place` in an environment with these variables alone; JAX itself reads those of SLURM."""

    def find(environment, **given):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return find_place(environment, **given)

    return find


def test_where_it_comes_from(place):
    assert place(SLURM) == Place("node07", 61440 + 1, 4, 3, (1,))
    assert place(JAX) == Place("10.0.0.1", 99, 4, 2)
    assert place(JAX, address="[::1]:7", count=3, index=0) == Place("::1", 7, 3, 0)
    assert place(JAX | {"JAX_LOCAL_DEVICE_IDS": "4,5"}).devices == (4, 5)
    assert place(SLURM | JAX) == Place("10.0.0.1", 99, 4, 2, (1,)), "flags and variables come before the cluster"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "unknown: the coordinator, the number of processes, the number of this one.*JAX_COORDINATOR_ADDRESS=HOST"),
        ({"address": "a:1", "count": 2}, r"unknown: the number of this one\. Start under SLURM"),
        ({"address": "somewhere", "count": 2, "index": 0}, "'somewhere' is not HOST:PORT"),
        ({"address": "a:b", "count": 2, "index": 0}, "'a:b' is not HOST:PORT"),
        ({"address": "a:1", "count": 2, "index": 2}, "Process 2 of 2: processes are numbered from 0 to 1"),
    ],
)
def test_what_is_missing_or_impossible_is_said(place, given, says):
    with pytest.raises(UserError, match=says):
        place({}, **given)


def test_a_variable_that_is_no_number_is_named(place):
    with pytest.raises(UserError, match="JAX_PROCESS_ID=two is not a number"):
        place(JAX | {"JAX_PROCESS_ID": "two"})


def test_several_processes_need_a_directory_that_they_share(place):
    words = ["--coordinator_address=127.0.0.1:1", "--num_processes=1", "--process_id=0", "--config=transformer_pp"]
    with pytest.raises(UserError, match="--distributed needs --workdir: a directory that all processes share"):
        main.main(words)
    with pytest.raises(UserError, match="--devices describes those of a --dry_run"):
        main.main([*words, "--dry_run", "--devices=3"])
