"""Test the parts of lab.benchmarks.tune that need no GPU."""

from collections.abc import Callable
from functools import partial

import jax
import pytest

from lab.benchmarks import tune
from tests import extras, support

extras.need("torch", "triton")


@pytest.mark.parametrize(
    ("make", "names"),
    [
        pytest.param(tune.delta_calls, tune.DELTA_KERNELS, id="delta"),
        pytest.param(tune.channel_calls, tune.CHANNEL_KERNELS, id="channel", marks=pytest.mark.slow),
        pytest.param(partial(tune.channel_calls, tied=True), tune.TIED_KERNELS, id="tied", marks=pytest.mark.slow),
    ],
)
def test_each_kernel_of_a_recurrence_runs(make: Callable, names: tuple[str, ...]) -> None:
    calls = make(B=1, T=16, H=1, K=16, V=16)
    assert set(calls) == set(names)
    for call in calls.values():
        assert all(x.size for x in jax.tree.leaves(call()()))


@pytest.mark.parametrize("kernel", tune.SELECTIVE_KERNELS)
def test_selective_scan_runs(kernel: str) -> None:
    made = jax.tree.leaves(tune.selective_call(kernel, B=1, T=3, E=5, N=2)())
    x, b, state = (1, 3, 5), (1, 3, 2), (1, 5, 2)
    assert [t.shape for t in made] == (
        [x, state, (1, 1, 5, 2)] if kernel == "selective" else [x, x, (5, 2), b, b, (5,), state, (5,)]
    )


@pytest.mark.parametrize("kernel", tune.CONV_KERNELS)
def test_convolution_runs(kernel: str) -> None:
    made = jax.tree.leaves(tune.conv_call(kernel, B=1, T=4, heads=1, K=3, V=5)())
    x = [(1, 4, 3), (1, 4, 3), (1, 4, 5)]
    assert [t.shape for t in made] == (x if kernel == "conv" else [*x, (3, 4), (3, 4), (5, 4)])


@pytest.mark.parametrize("kernel", support.slow_unless(lambda kernel: kernel.endswith("_moved"), tune.SHIFT_KERNELS))
def test_token_shift_runs(kernel: str) -> None:
    made = jax.tree.leaves(tune.shift_call(kernel, B=1, T=3, D=5)())
    N = 5 if kernel.endswith("_moved") else 6
    x, moves = (1, 3, 5), [(N, 1, 3, 5)] if kernel.endswith("_moved") else []
    assert [t.shape for t in made] == ([x, (N, 5), *moves] if "bwd" in kernel else [x] * N)


@pytest.mark.parametrize("kernel", tune.OPERAND_KERNELS)
def test_operands_run(kernel: str) -> None:
    made = jax.tree.leaves(tune.operands_call(kernel, B=1, T=3, H=2, K=8)())
    x, vectors = (1, 3, 2, 8), (1, 6, 2, 8)
    wanted = [*[x] * 5, x[:3], *[x] * 3] if kernel == "operands_forward" else [*[x] * 7, vectors]
    assert [t.shape for t in made] == wanted


def test_loss_runs() -> None:
    losses, g = tune.loss_call(n_tokens=3, n_vocab=20)()
    assert (losses.shape, g.shape) == ((1, 3), (1, 3, 20))


@pytest.mark.parametrize("kernel", support.slow_unless(lambda kernel: kernel.endswith("_all"), tune.NORM_KERNELS))
def test_norms_run(kernel: str) -> None:
    assert all(x.size for x in jax.tree.leaves(tune.norm_call(kernel, B=1, T=3)()))


def test_table_entry_is_tried_first() -> None:
    from kernels_pallas.cross_entropy.triton import loss
    from kernels_pallas.delta_rule.triton import scan as delta
    from kernels_pallas.head_norm.triton import norm
    from kernels_pallas.linear_attention.triton import scan as channel
    from kernels_pallas.selective_scan.triton import scan as selective
    from kernels_pallas.short_conv.triton import conv
    from kernels_pallas.wkv7_operands.triton import operands

    scans = [(tune.scan_candidates, delta.TILES["rows", 16], 18), (tune.scan_candidates, channel.TILES["out", 16], 36)]
    for candidates, first, n in (*scans, (tune.keys_candidates, channel.TILES["keys", 16], 24)):
        tiles = candidates(first)
        assert tiles[0] == first
        assert len(tiles) == len(set(tiles)) == n
    tiles = tune.conv_candidates(conv.TILES["conv"])
    assert tiles[0] == conv.TILES["conv"]
    assert len(tiles) == len(set(tiles)) == 36
    for first, n in ((norm.TILES["backward"], 81), (norm.TILES["forward_all"], 27)):
        tiles = tune.norm_candidates(first)
        assert tiles[0] == first
        assert len(tiles) == len(set(tiles)) == n
    tiles = tune.operand_candidates(operands.TILES["backward"])
    assert tiles[0] == operands.TILES["backward"]
    assert len(tiles) == len(set(tiles)) == 36
    for kernel, n in (("selective", 6), ("selective_bwd", 18)):
        first = selective.TILES[tune.SELECTIVE_KERNELS[kernel]]
        tiles = tune.selective_candidates(kernel, first)
        assert tiles[0] == first
        assert len(tiles) == len(set(tiles)) == n
    tiles = tune.loss_candidates(loss.TILES["loss"])
    assert tiles[0] == loss.TILES["loss"]
    assert len(tiles) == len(set(tiles)) == 10
