"""The bytes that a compiled program exchanges, read off its text."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.harness.exchanged import exchanged
from seqjax.sharding import make_mesh

ASYNCHRONOUS = """HloModule m, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  %all-gather-start = ((f32[4]{0}, bf16[6]{0}), (f32[8]{0}, bf16[12]{0})) all-gather-start(%a, %b), dimensions={0}
  ROOT %out = (s32[], f32[8]{0}) tuple(%i, %c)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %all-reduce-start = f32[4]{0} all-reduce-start(%p), to_apply=%add
  %all-reduce-done = f32[4]{0} all-reduce-done(%all-reduce-start)
  %while = (s32[], f32[8]{0}) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %copy = f32[4]{0} copy(%all-reduce-done)
}
"""


def test_what_is_started_counts_its_results_and_a_loop_as_often_as_it_runs() -> None:
    assert exchanged(ASYNCHRONOUS) == {"all-reduce": 4 * 4, "all-gather": 5 * (8 * 4 + 12 * 2)}


@pytest.mark.skipif(jax.device_count() != 8, reason="eight devices wanted (XLA_FLAGS was given)")
def test_of_a_compiled_program() -> None:
    """A sum over devices in each of three turns, and an array that is wanted whole."""
    mesh = make_mesh(data=4, devices=jax.devices()[:4])
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], []))

    @functools.partial(jax.jit, in_shardings=(split, split), out_shardings=whole)
    def f(x, y):
        turn = lambda total, _: (total + jnp.sum(jnp.tanh(x * total), axis=0), None)  # noqa: E731
        return jax.lax.scan(turn, jnp.ones((16, 4)), length=3)[0], y

    shapes = jax.ShapeDtypeStruct((8, 16, 4), jnp.float32), jax.ShapeDtypeStruct((4, 5), jnp.int32)
    found = exchanged(str(f.lower(*shapes).compile().as_text()))
    assert found == {"all-reduce": 3 * 16 * 4 * 4, "all-gather": 4 * 5 * 4}
