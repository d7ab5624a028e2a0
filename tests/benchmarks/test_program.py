"""Test the kernel and byte counts of compiled programs."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.harness.program import work
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


def test_asynchronous_collectives_and_loops_are_counted() -> None:
    assert work(ASYNCHRONOUS).exchanged == {"all-reduce": 4 * 4, "all-gather": 5 * (8 * 4 + 12 * 2)}


FUSED = """HloModule m, entry_computation_layout={(f32[3,100]{1,0})->f32[3,100]{1,0}}

%cut (p0: f32[3,100], p1: s32[], p2: f32[3,100], p3: bf16[100]) -> (f32[3,100], f32[100]) {
  %p0 = f32[3,100]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[3,100]{1,0} parameter(2)
  %p3 = bf16[100]{0} parameter(3)
  %flat = f32[300]{0} bitcast(%p0)
  %part = f32[100]{0} dynamic-slice(%flat, %p1), dynamic_slice_sizes={100}
  %wide = f32[100]{0} convert(%p3)
  %sum = f32[100]{0} add(%part, %wide)
  %row = f32[1,100]{1,0} bitcast(%sum)
  %put = f32[3,100]{1,0} dynamic-update-slice(%p2, %row, %p1, %p1)
  ROOT %both = (f32[3,100]{1,0}, f32[100]{0}) tuple(%put, %sum)
}

%body (state: (s32[], f32[3,100])) -> (s32[], f32[3,100]) {
  %state = (s32[], f32[3,100]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[3,100]{1,0} get-tuple-element(%state), index=1
  %y = bf16[100]{0} custom-call(%i), custom_call_target="y"
  %fusion = (f32[3,100]{1,0}, f32[100]{0}) fusion(%x, %i, %x, %y), kind=kLoop, calls=%cut
  ROOT %out = (s32[], f32[3,100]{1,0}) tuple(%i, %x)
}

ENTRY %main (p: f32[3,100]) -> f32[3,100] {
  %p = f32[3,100]{1,0} parameter(0)
  %product = (f32[3,3]{1,0}, s8[4096]{0}) custom-call(%p, %p), custom_call_target="gemm"
  ROOT %while = (s32[], f32[3,100]{1,0}) while(%t), body=%body, backend_config={"known_trip_count":{"n":"7"}}
}
"""


def test_kernels_and_moved_bytes() -> None:
    """A loop fusion reads and writes slices; a repeated operand counts once; a workspace does not count."""
    # y: index, bf16 row. Fusion: slice, index, bf16 row; written slice, sum.
    loop = (4 + 200) + (400 + 4 + 200 + 400 + 400)
    counts = work(FUSED)
    assert counts.kernels == 1 + 7 * 2
    assert counts.bytes == 1200 + 36 + 7 * loop
    assert not counts.exchanged


@pytest.mark.skipif(jax.device_count() != 8, reason="needs eight devices (XLA_FLAGS)")
def test_compiled_program_on_four_devices() -> None:
    """Each of three loop turns sums over devices, and one output is gathered."""
    mesh = make_mesh(data=4, devices=jax.devices()[:4])
    split, replicated = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], []))

    @functools.partial(jax.jit, in_shardings=(split, split), out_shardings=replicated)
    def f(x, y):
        turn = lambda total, _: (total + jnp.sum(jnp.tanh(x * total), axis=0), None)  # noqa: E731
        return jax.lax.scan(turn, jnp.ones((16, 4)), length=3)[0], y

    shapes = jax.ShapeDtypeStruct((8, 16, 4), jnp.float32), jax.ShapeDtypeStruct((4, 5), jnp.int32)
    exchanged = work(str(f.lower(*shapes).compile().as_text())).exchanged
    assert exchanged == {"all-reduce": 3 * 16 * 4 * 4, "all-gather": 4 * 5 * 4}
