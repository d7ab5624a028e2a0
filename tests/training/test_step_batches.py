"""Into how many micro-batches a step is divided, on the devices that there are."""

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
    """Any number of devices: only the mesh's shape counts, so they may all be the same one."""
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
        ("135m_100k", {1: 8, 2: 4, 8: 1}),  # the paper's own on the paper's eight devices
        ("debug", {1: 1, 2: 1, 4: 1}),
    ],
)
def test_the_paper_s_sizes_on_any_devices(size, expected):
    train = from_config_dict(presets.read_config(f"transformer_pp:{size}")).train
    assert {n: micro_batches(train, mesh_of(data=n)) for n in expected} == expected
    assert {n: micro_batches(train, mesh_of(fsdp=n)) for n in expected} == expected
    for n in expected:
        per_device = train.batch_size / n / expected[n]
        assert per_device == int(per_device) <= (train.per_device_batch_size or train.batch_size)


@pytest.mark.parametrize(
    ("train", "devices", "expected"),
    [
        (settings(12, per_device_batch_size=5), {}, 3),  # of 4: five do not divide the twelve
        (settings(12, per_device_batch_size=5), {"data": 2}, 2),  # of 6, 3 on a device
        (settings(12, per_device_batch_size=6), {"data": 2}, 1),
        (settings(12, per_device_batch_size=100), {}, 1),
        (settings(7, per_device_batch_size=4), {}, 7),
        (settings(12, per_device_batch_size=1), {"data": 2, "fsdp": 3}, 2),
        (settings(12, per_device_batch_size=3), {"data": 2, "tensor": 4}, 2),  # those along tensor share sequences
        (settings(12, accumulate=4), {}, 4),
        (settings(12, accumulate=1, per_device_batch_size=2), {}, 1),  # what is set by hand holds
        (settings(12, accumulate=2, per_device_batch_size=1), {"data": 2}, 2),
    ],
)
def test_as_few_as_the_limit_allows(train, devices, expected):
    assert micro_batches(train, mesh_of(**devices)) == expected


@pytest.mark.parametrize(
    ("train", "devices", "says"),
    [
        (settings(4), {"data": 8}, "batch_size=4 sequences.*data=8 x fsdp=1 devices. The nearest that fits is 8. Or"),
        (settings(256), {"data": 3, "fsdp": 2}, r"batch_size=256.*data=3 x fsdp=2.*that fit are 252 and 258\."),
        (settings(9, per_device_batch_size=1), {"data": 2, "tensor": 2}, r"batch_size=9.*data=2.*fit are 8 and 10\."),
        (settings(9, accumulate=3), {"data": 2}, r"batch_size=9.*fit are 6 and 12\."),
        (settings(12, accumulate=2), {"data": 4}, r"accumulate=2: a micro-batch of 6.*Give None.*fit are 8 and 16\."),
        (settings(8, accumulate=8), {"fsdp": 8}, r"accumulate=8: a micro-batch of 1.*that fits is 64\."),
    ],
)  # fmt: skip
def test_what_devices_cannot_share_names_the_nearest_that_fit(train, devices, says):
    with pytest.raises(UserError, match=says) as caught:
        micro_batches(train, mesh_of(**devices))
    sizes = [
        int(word.rstrip("."))
        for word in str(caught.value).split("The nearest that fit")[1].split()
        if word[0].isdigit()
    ]
    assert sizes
    for size in sizes:
        micro_batches(dataclasses.replace(train, batch_size=size), mesh_of(**devices))


def test_what_is_set_by_hand_says_that_it_passes_the_limit():
    by_hand, mesh = settings(32, accumulate=1, per_device_batch_size=4), mesh_of(data=4)
    assert division(by_hand, mesh) == (
        "1 micro-batch of 32 sequences, 8 on each device: "
        "config.train.accumulate=1 takes precedence over .per_device_batch_size=4"
    )
    assert division(dataclasses.replace(by_hand, accumulate=2), mesh) == (
        "2 micro-batches of 16 sequences, 4 on each device"
    )


@pytest.mark.parametrize(
    ("given", "train", "devices", "expected"),
    [
        (None, settings(256, per_device_batch_size=16), {}, 16),
        (None, settings(256, per_device_batch_size=16), {"data": 4}, 64),
        (None, settings(32, per_device_batch_size=16), {"data": 8}, 32),
        (None, settings(32), {"data": 3}, 33),  # a workdir is evaluated on any devices
        (None, settings(256, accumulate=16), {"data": 4}, 16),
        (None, settings(8, accumulate=8), {"data": 4}, 4),
        (12, settings(256), {"data": 4, "tensor": 2}, 12),
        (13, settings(256, per_device_batch_size=1), {"fsdp": 4}, 16),
    ],
)
def test_evaluation_takes_a_multiple_of_the_devices(given, train, devices, expected):
    mesh = mesh_of(**devices)
    assert eval_batch_size(given, train, mesh) == expected
    assert expected % batch_shards(mesh) == 0
