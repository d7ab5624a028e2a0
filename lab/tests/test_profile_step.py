"""Test how lab.benchmarks.profile_step attributes the time of a step."""

import pytest

from benchmarks.harness.trace import Kernel
from lab.benchmarks.profile_step import covered_ms, instructions, part

MS = 1e6


def test_overlapping_kernels_are_counted_once():
    ran = [Kernel("gpu", "fusion.1", 0, 3 * MS), Kernel("gpu", "all-reduce.2", 2 * MS, 5 * MS)]
    assert covered_ms(ran) == pytest.approx(5)
    assert covered_ms([k for k in ran if not k.is_collective]) == pytest.approx(3), (
        "2 ms of the exchange overlap no kernel"
    )


def test_nested_kernels_and_gaps():
    ran = [Kernel("gpu", "a", 0, 4 * MS), Kernel("gpu", "b", 1 * MS, 2 * MS), Kernel("gpu", "c", 6 * MS, 7 * MS)]
    assert covered_ms(ran[::-1]) == pytest.approx(5)


@pytest.mark.parametrize("name", ["all-reduce.7", "all-gather-start", "reduce-scatter.1", "all-to-all.3"])
def test_collectives_are_recognised_by_instruction_name(name):
    assert Kernel("gpu", name, 0, 1).is_collective
    assert not Kernel("gpu", f"fusion-{name}", 0, 1).is_collective


def test_part_names_the_direction():
    assert part("jit(f)/jvp(mixer)/dot_general") == "mixer, forward"
    assert part("jit(f)/transpose(jvp(mixer))/dot_general") == "mixer, backward"
    assert part("jit(f)/rematted_computation/mlp/add") == "mlp, again"
    assert part("jit(f)/transpose(jvp(mlp))/rematted_computation/mul") == "mlp, again"
    assert part("jit(f)/optimizer/mul") == "optimizer"


def test_instruction_with_many_results():
    """XLA adds an index comment at every fifth result."""
    types = ", ".join(["bf16[2,4]{1,0}"] * 5 + ["/*index=5*/f32[8]{0}"])
    line = f'  %triton.7 = ({types}) custom-call(%a, %b), metadata={{op_name="jit(f)/transpose(jvp(mixer))/keys"}}'
    shape = f"({', '.join(['bf16[2,4]'] * 5)}, f32[8])"
    assert instructions(line) == {"triton.7": ("jit(f)/transpose(jvp(mixer))/keys", shape)}


def test_fusion_instruction():
    hlo = '  %fusion.3 = f32[8,16]{1,0} fusion(%a), kind=kLoop, metadata={op_name="jit(f)/mixer/add"}\n'
    assert instructions(hlo) == {"fusion.3": ("jit(f)/mixer/add", "f32[8,16]")}
