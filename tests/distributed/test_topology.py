"""The banner of a run of several processes."""

from types import SimpleNamespace

from seqjax.distributed.place import Place
from seqjax.distributed.topology import banner


def devices(*processes):
    """A device of each process that is named, numbered in that order."""
    kind = {"device_kind": "NVIDIA H200", "platform": "gpu"}
    return [SimpleNamespace(id=i, process_index=process, **kind) for i, process in enumerate(processes)][::-1]


def test_hosts_processes_devices_and_mesh():
    hosts, place = ["a", "a", "b"], Place("a", 99, 3, 0)
    text = banner(hosts, place, devices=devices(0, 0, 1, 1, 2, 2), axes={"data": 1, "fsdp": 6})
    assert text.splitlines() == [
        "3 processes on 2 hosts, 2 devices in each: 6 x NVIDIA H200 (gpu), mesh data=1 x fsdp=6",
        "  a: process 0-1, device 0-3; process 0 coordinates, at a:99, and writes",
        "  b: process 2, device 4-5",
    ]
    first, _, last = banner(hosts, place, devices=devices(0, 1, 2, 2), axes={"data": 4}).splitlines()
    assert "1 or 2 devices in each: 4 x" in first
    assert last == "  b: process 2, device 2-3"


def test_processes_of_a_host_need_not_follow_each_other():
    place = Place("a", 99, 3, 0)
    first, a, b = banner(["a", "b", "a"], place, devices=devices(0, 1, 2), axes={"data": 3}).splitlines()
    assert "3 processes on 2 hosts, 1 device in each" in first
    assert a.startswith("  a: process 0, 2, device 0, 2; process 0")
    assert b == "  b: process 1, device 1"
