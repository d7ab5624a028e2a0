"""The number of micro-batches per step for a batch size and a mesh."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from seqjax.config import TrainConfig, from_config_dict, presets
from seqjax.errors import UserError
from seqjax.sharding import AXES
from seqjax.training.step import batch_shards, division, eval_batch_size, micro_batches


def mesh_of(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """Return a mesh of any size; only its shape counts, so it repeats one device."""
    shape = {"data": data, "fsdp": fsdp, "tensor": tensor}
    sizes = [shape.get(axis, 1) for axis in AXES]
    return Mesh(np.array([jax.devices()[0]] * int(np.prod(sizes))).reshape(sizes), AXES)


def settings(batch_size: int, **others) -> TrainConfig:
    return TrainConfig(steps=1, seq_len=8, batch_size=batch_size, **others)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("110m", {1: 16, 2: 8, 4: 4, 8: 2, 16: 1, 32: 1, 256: 1}),
        ("1b3", {1: 16, 2: 8, 8: 2, 16: 1, 128: 1}),
        ("135m_100k", {1: 8, 2: 4, 8: 1}),  # 8 devices as in the paper
        ("debug", {1: 1, 2: 1, 4: 1}),
    ],
)
def test_paper_sizes_run_on_any_device_count(size, expected):
    train = from_config_dict(presets.read_config(f"transformer_pp:{size}")).train
    assert {n: micro_batches(train, mesh_of(data=n)) for n in expected} == expected
    assert {n: micro_batches(train, mesh_of(fsdp=n)) for n in expected} == expected
    for n in expected:
        per_device = train.batch_size / n / expected[n]
        assert per_device == int(per_device) <= (train.per_device_batch_size or train.batch_size)


@pytest.mark.parametrize(
    ("train", "devices", "expected"),
    [
        (settings(12, per_device_batch_size=5), {}, 3),  # 4 sequences each: 5 does not divide 12
        (settings(12, per_device_batch_size=5), {"data": 2}, 2),  # 6 sequences, 3 per device
        (settings(12, per_device_batch_size=6), {"data": 2}, 1),
        (settings(12, per_device_batch_size=100), {}, 1),
        (settings(7, per_device_batch_size=4), {}, 7),
        (settings(12, per_device_batch_size=1), {"data": 2, "fsdp": 3}, 2),
        (settings(12, per_device_batch_size=3), {"data": 2, "tensor": 4}, 2),  # devices along tensor share sequences
        (settings(12, accumulate=4), {}, 4),
        (settings(12, accumulate=1, per_device_batch_size=2), {}, 1),  # accumulate takes precedence
        (settings(12, accumulate=2, per_device_batch_size=1), {"data": 2}, 2),
    ],
)
def test_fewest_micro_batches_within_the_limit(train, devices, expected):
    assert micro_batches(train, mesh_of(**devices)) == expected


@pytest.mark.parametrize(
    ("train", "devices", "pattern"),
    [
        (settings(4), {"data": 8}, r"batch_size=4 .*data=8 x fsdp=1 .* 8\. .*config\.mesh"),
        (settings(256), {"data": 3, "fsdp": 2}, r"batch_size=256.*data=3 x fsdp=2.* 252 and 258\."),
        (settings(9, per_device_batch_size=1), {"data": 2, "tensor": 2}, r"batch_size=9.*data=2.* 8 and 10\."),
        (settings(9, accumulate=3), {"data": 2}, r"batch_size=9.* 6 and 12\."),
        (settings(12, accumulate=2), {"data": 4}, r"accumulate=2: .* of 6 .*None.* 8 and 16\)"),
        (settings(8, accumulate=8), {"fsdp": 8}, r"accumulate=8: .* of 1 .* 64\)"),
    ],
)  # fmt: skip
def test_indivisible_batch_error_lists_valid_sizes(train, devices, pattern):
    with pytest.raises(UserError, match=pattern) as caught:
        micro_batches(train, mesh_of(**devices))
    sizes = [int(word.strip(".)")) for word in str(caught.value).split("nearest size")[1].split() if word[0].isdigit()]
    assert sizes
    for size in sizes:
        micro_batches(dataclasses.replace(train, batch_size=size), mesh_of(**devices))


def test_accumulate_takes_precedence_over_the_limit():
    accumulated, mesh = settings(32, accumulate=1, per_device_batch_size=4), mesh_of(data=4)
    assert division(accumulated, mesh) == (
        "1 micro-batch of 32 sequences, 8 on each device: "
        "config.train.accumulate=1 takes precedence over .per_device_batch_size=4"
    )
    assert division(dataclasses.replace(accumulated, accumulate=2), mesh) == (
        "2 micro-batches of 16 sequences, 4 on each device"
    )


@pytest.mark.parametrize(
    ("requested", "train", "devices", "expected"),
    [
        (None, settings(256, per_device_batch_size=16), {}, 16),
        (None, settings(256, per_device_batch_size=16), {"data": 4}, 64),
        (None, settings(32, per_device_batch_size=16), {"data": 8}, 32),
        (None, settings(32), {"data": 3}, 33),  # evaluation runs on any number of devices
        (None, settings(256, accumulate=16), {"data": 4}, 16),
        (None, settings(8, accumulate=8), {"data": 4}, 4),
        (12, settings(256), {"data": 4, "tensor": 2}, 12),
        (13, settings(256, per_device_batch_size=1), {"fsdp": 4}, 16),
    ],
)
def test_evaluation_batch_is_a_multiple_of_the_devices(requested, train, devices, expected):
    mesh = mesh_of(**devices)
    assert eval_batch_size(requested, train, mesh) == expected
    assert expected % batch_shards(mesh) == 0
