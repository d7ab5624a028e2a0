"""What a run of several processes consists of, as text."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from seqjax.distributed.place import Place


def banner(hosts: Sequence[str], place: Place, *, devices: Iterable[Any], axes: Mapping[str, int]) -> str:
    """Return a line on all processes and one per host.

    Args:
        hosts: The host of every process.
        place: Where they met.
        devices: The devices of all of them.
        axes: Number of devices per mesh axis.
    """
    devices = sorted(devices, key=lambda device: device.id)
    of_process = {i: [d.id for d in devices if d.process_index == i] for i in range(len(hosts))}
    counts = sorted({len(ids) for ids in of_process.values()})
    each = " or ".join(map(str, counts))
    mesh = " x ".join(f"{axis}={n}" for axis, n in axes.items())
    out = [
        f"{_some(len(hosts), 'process', 'processes')} on {_some(len(set(hosts)), 'host', 'hosts')}, {each} "
        f"device{'' if counts == [1] else 's'} in each: {len(devices)} x {devices[0].device_kind} "
        f"({devices[0].platform}), mesh {mesh}"
    ]
    for host in dict.fromkeys(hosts):
        here = [i for i, other in enumerate(hosts) if other == host]
        ids = sorted(itertools.chain.from_iterable(of_process[i] for i in here))
        lead = f"; process 0 coordinates, at {place.host}:{place.port}, and writes" if 0 in here else ""
        out.append(f"  {host}: process {_ranges(here)}, device {_ranges(ids)}{lead}")
    return "\n".join(out)


def _some(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return [0, 1, 2, 5] as 0-2, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
