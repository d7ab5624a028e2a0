"""Bytes per device, compared with allocated arrays, and the parameter table."""

import jax
import numpy as np
import pytest

from seqjax.config import from_config_dict, presets
from seqjax.models import Model
from seqjax.sharding import batch_sharding, make_mesh, shardings
from seqjax.training import schedule
from seqjax.training.step import bytes_per_device, init_state, parameter_table, state_shardings
from tests import support

MESHES = [
    {"data": 1},
    {"data": 2},
    {"data": 1, "fsdp": 2},
    {"data": 1, "tensor": 2},
    {"data": 4},
    {"data": 1, "fsdp": 4},
    {"data": 1, "tensor": 4},
    {"data": 2, "fsdp": 2},
    {"data": 2, "tensor": 2},
    {"data": 1, "fsdp": 2, "tensor": 2},
]


def mesh_of(**sizes: int):
    return make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


@pytest.mark.parametrize("sizes", MESHES, ids=lambda sizes: "-".join(f"{k}{n}" for k, n in sizes.items()))
def test_bytes_match_the_allocated_arrays(sizes):
    mesh = mesh_of(**sizes)
    config = support.tiny("transformer_pp", model__mlp__dim=50)  # not divisible by 4
    model = Model(config.model, max_len=config.train.seq_len)
    optimizer = schedule.optimizer(config.optim)
    shapes = jax.eval_shape(lambda: init_state(model, optimizer, jax.random.key(0)))
    by_leaf = state_shardings(mesh, model, optimizer, shapes)
    state = jax.tree.map(lambda x, s: jax.device_put(np.zeros(x.shape, x.dtype), s), shapes, by_leaf)
    assert support.bytes_held(state) == {bytes_per_device(shapes, by_leaf)}
    tokens = np.zeros((3, 8, 24), np.int32)
    sharding = batch_sharding(mesh, leading=1)
    assert support.bytes_held(jax.device_put(tokens, sharding)) == {bytes_per_device(tokens, sharding)}


def table_of(mixer, variant="", *, mesh, **overrides):
    model = support.tiny_model(mixer, variant, **overrides)
    lines = parameter_table(model, shardings(mesh, model.shapes, model.axes))
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


def test_parameter_table_rows():
    """Four layers of width 32, four heads of 8, MLP 48, 48 words; fp32, so 4 bytes each."""
    rows = table_of("transformer_pp", model__n_layers=4, mesh=mesh_of(data=2, fsdp=2, tensor=2))
    assert rows == [
        ["parameter", "shape", "axes", "split over", "per device"],
        ["blocks.*.mixer.{k,q,v}.w x4", "32 x 32", "embed, heads", "fsdp, tensor", "12.00 KiB"],
        ["blocks.*.mixer.out.w x4", "32 x 32", "heads, embed", "tensor, fsdp", "4.00 KiB"],
        ["blocks.*.mlp.down.w x4", "48 x 32", "mlp, embed", "tensor, fsdp", "6.00 KiB"],
        ["blocks.*.mlp.{gate,up}.w x4", "32 x 48", "embed, mlp", "fsdp, tensor", "12.00 KiB"],
        ["blocks.*.{norm1,norm2}.g x4", "32", "embed", "fsdp", "512 B"],
        ["embed", "48 x 32", "vocab, embed", "tensor, fsdp", "1.50 KiB"],
        ["norm.g", "32", "embed", "fsdp", "64 B"],
        ["all", "36.06 KiB"],
    ]
    data_parallel = table_of("transformer_pp", model__n_layers=4, mesh=mesh_of(data=4))
    assert [row[:3] for row in data_parallel[:-1]] == [row[:3] for row in rows[:-1]]
    assert {row[3] for row in data_parallel[1:-1]} == {"whole"}
    assert data_parallel[1][-1] == "48.00 KiB"


def test_indivisible_axis_is_not_split():
    rows = table_of("transformer_pp", model__mlp__dim=49, mesh=mesh_of(data=1, tensor=2))
    assert next(row for row in rows if "gate,up" in row[0])[3] == "whole"


def test_common_parameters_of_several_mixers_share_rows():
    two = "{'name':'transformer_pp','heads':4},{'name':'mamba2','head_dim':8}"
    flag = f"transformer_pp:debug,model.n_layers=12,model.mixer=({two},{two})"
    model = Model(from_config_dict(presets.read_config(flag)).model, max_len=8)
    lines = parameter_table(model, shardings(mesh_of(data=1), model.shapes, model.axes))
    labels = [line.split("  ")[0] for line in lines]
    assert "blocks.{0,2}.mixer.{k,q,v}.w x6" in labels
    assert "blocks.{1,3}.mixer.{a_log,dt_bias,skip} x6" in labels
    assert "blocks.*.{norm1,norm2}.g x12" in labels


@pytest.mark.parametrize(("mixer", "variant"), support.FIRST)
def test_parameter_table_is_short_and_complete(mixer, variant):
    mesh = mesh_of(data=1, fsdp=2, tensor=2)
    model = support.tiny_model(mixer, variant, model__n_layers=6)
    by_param = shardings(mesh, model.shapes, model.axes)
    lines = parameter_table(model, by_param)
    assert len(lines) <= 22
    assert max(map(len, lines)) <= 140
    units = {"B": 1, "KiB": 1024, "MiB": 1024**2}
    shown = [float(line.split()[-2]) * units[line.split()[-1]] for line in lines[1:]]
    assert sum(shown[:-1]) == pytest.approx(bytes_per_device(model.shapes, by_param), rel=1e-3)
    assert shown[-1] == pytest.approx(sum(shown[:-1]), rel=1e-3)
