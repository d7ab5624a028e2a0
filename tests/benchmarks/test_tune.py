"""The search for tiles, as far as it goes without a GPU."""

import jax

from benchmarks import tune
from tests import extras

extras.need("torch", "triton")


def test_every_kernel_of_the_delta_rule_runs_alone() -> None:
    calls = tune.delta_calls(B=1, T=16, H=1, K=16, V=16)
    assert tuple(calls) == tune.DELTA_KERNELS
    for call in calls.values():
        assert all(x.size for x in jax.tree.leaves(call()()))


def test_the_loss_runs_alone() -> None:
    losses, g = tune.loss_call(n_tokens=3, n_vocab=20)()
    assert (losses.shape, g.shape) == ((1, 3), (1, 3, 20))


def test_the_table_s_entry_is_tried_first() -> None:
    from kernels_pallas.cross_entropy.triton import loss
    from kernels_pallas.delta_rule.triton.scan import TILES

    first = TILES["rows", 16]
    tiles = tune.delta_candidates(first)
    assert tiles[0] == first
    assert len(tiles) == len(set(tiles)) == 12
    tiles = tune.loss_candidates(loss.TILES["loss"])
    assert tiles[0] == loss.TILES["loss"]
    assert len(tiles) == len(set(tiles)) == 10
