"""The process that the members of a run meet at: `python -m seqjax.distributed.hub`, which process 0 starts.

It does three things. A roll call: members connect and say who they are, and all are let go on when the last one has
come; whoever is missing is named. JAX's coordination service: in process 0, where `jax.distributed.initialize` puts it,
the end of that process aborts all others before any can say why. And a watch: a member whose connection ends, or who is
silent for `SILENT_SECONDS`, is named to the others, which then end (seqjax/distributed/membership.py).

Messages are lines of JSON. A member sends {"hello": ...}, then {"beat": true} every `BEAT_SECONDS`, and at its end
{"done": true} or {"failed": text, "status": n}. The hub answers {"go": {"port": n, "hosts": [...]}}, beats as well, and
ends with {"all_done": true} or {"end": text, "status": n}.

The hub lives until process 0, whose pipe is its standard input, and all members are gone. Signals are for the members:
what SLURM or a terminal sends to all of them does not end it.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
from typing import Any

from seqjax.distributed import jax_private
from seqjax.errors import LOST

BEAT_SECONDS = 5.0
SILENT_SECONDS = 30.0
LINGER_SECONDS = 10.0  # how long the hub outlives process 0 for members that are still there


class Hub:
    """The state of a roll call and of the watch after it."""

    def __init__(self, count: int, *, start_seconds: float, silent_seconds: float, beat_seconds: float):
        """Expect `count` members, each at most `start_seconds` after the one before it."""
        self._count = count
        self._start_seconds, self._silent_seconds, self._beat_seconds = start_seconds, silent_seconds, beat_seconds
        self._hellos: dict[int, dict[str, Any]] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._done: set[int] = set()
        self._reason: dict[str, Any] | None = None  # why all end
        self._late: asyncio.TimerHandle | None = None
        self._service: Any = None
        self._expect_the_next()

    def _expect_the_next(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = asyncio.get_running_loop().call_later(self._start_seconds, self._name_the_missing)

    def _name_the_missing(self) -> None:
        missing = [i for i in range(self._count) if i not in self._hellos]
        here = ", ".join(f"{i} on {hello['host']}" for i, hello in sorted(self._hellos.items()))
        nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("TPU_WORKER_HOSTNAMES")
        self._end(
            f"{len(self._hellos)} of {self._count} processes have come, and no other one in "
            f"{self._start_seconds:.0f} s. Missing: process {_listed(missing)}. Here: {here}."
            f"{f' The hosts are {nodes}.' if nodes else ''} Look at the output of the missing ones; "
            "--start_timeout=SECONDS waits longer."
        )

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Listen to a connection until it ends."""
        try:
            hello = json.loads(await asyncio.wait_for(reader.readline(), self._silent_seconds))["hello"]
            index = int(hello["process"])
        except (ValueError, KeyError, TypeError, OSError, TimeoutError):  # not one of ours
            writer.close()
            return
        if self._reason is not None or self._refused(index, hello):
            if self._reason is not None:
                _send(writer, self._reason)
            writer.close()
            return
        self._hellos[index], self._writers[index] = hello, writer
        if len(self._hellos) == self._count:
            self._let_go()
        else:
            self._expect_the_next()
        why = await self._listen(reader, index)
        if why:
            self._end(f"{self._name(index)} {why}", without=index)
        del self._writers[index]
        writer.close()

    def _refused(self, index: int, hello: dict[str, Any]) -> bool:
        """Return whether the member does not belong to this run, which ends all."""
        fault = ""
        if hello["processes"] != self._count:
            fault = f"Process {index} on {hello['host']} expects {hello['processes']} processes, not {self._count}."
        elif index in self._hellos:
            other = self._hellos[index]
            fault = (
                f"Two processes have the number {index}: {other['pid']} on {other['host']} and {hello['pid']} on "
                f"{hello['host']}. Each needs its own --process_id, from 0 to {self._count - 1}."
            )
        elif self._hellos and hello["versions"] != (first := next(iter(self._hellos.values())))["versions"]:
            fault = (
                f"Process {index} on {hello['host']} has {hello['versions']}, another one on {first['host']} "
                f"{first['versions']}: install the same versions on every host."
            )
        if fault:
            self._end(fault, status=2)
        return bool(fault)

    def _let_go(self) -> None:
        assert self._late is not None
        self._late.cancel()
        hosts = [self._hellos[i]["host"] for i in range(self._count)]
        try:
            port = self._start_service()
        except Exception as error:  # Nobody sees it here, and the members would wait for ever.
            self._end(f"JAX's coordination service does not start ({type(error).__name__}: {error})", status=1)
            return
        self._tell({"go": {"port": port, "hosts": hosts}})

    def _start_service(self) -> int:
        """Start JAX's coordination service and return its port."""
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        self._service = jax_private.start_service(port, count=self._count)
        return port

    async def _listen(self, reader: asyncio.StreamReader, index: int) -> str:
        """Return why a member is lost, once it is; "" at its regular end."""
        while True:
            try:
                line = await asyncio.wait_for(reader.readline(), self._silent_seconds)
            except TimeoutError:
                return (
                    f"has not been heard of for {self._silent_seconds:.0f} s: its host or the network is down, or it "
                    "was stopped."
                )
            except OSError:
                line = b""
            if not line:
                finished = len(self._done) == self._count
                return "" if finished else "is gone without a word: it was killed, ran out of memory or crashed."
            message = json.loads(line)
            if "failed" in message:
                self._end(f"{self._name(index)} ended: {message['failed']}", status=message["status"], without=index)
            if "done" in message:
                self._done.add(index)
                if len(self._done) == self._count:
                    self._tell({"all_done": True})

    def _name(self, index: int) -> str:
        hello = self._hellos[index]
        return f"Process {index} (pid {hello['pid']}) on {hello['host']}"

    def _end(self, text: str, *, status: int = LOST, without: int | None = None) -> None:
        """Tell all members but one to end; only the first reason counts, for others may follow from it."""
        if self._reason is None:
            self._reason = {"end": text, "status": status}
            self._tell(self._reason, without=without)

    def _tell(self, message: dict[str, Any], *, without: int | None = None) -> None:
        for index, writer in self._writers.items():
            if index != without:
                _send(writer, message)

    async def beat(self) -> None:
        """Show the members that the hub lives."""
        while True:
            self._tell({"beat": True})
            await asyncio.sleep(self._beat_seconds)

    async def until_alone(self, linger_seconds: float) -> None:
        """Wait until all members have gone, or for some seconds."""
        for _ in range(int(linger_seconds * 10)):
            if not self._writers:
                return
            await asyncio.sleep(0.1)


def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    if not writer.is_closing():  # What is sent to a host that is gone is lost without an error.
        writer.write(json.dumps(message).encode() + b"\n")


def _listed(numbers: list[int]) -> str:
    text = ", ".join(map(str, numbers[:20]))
    return f"{text} and {len(numbers) - 20} more" if len(numbers) > 20 else text


async def run(given: argparse.Namespace) -> None:
    """Serve until process 0 and the other members are gone."""
    hub = Hub(
        given.processes,
        start_seconds=given.start_seconds,
        silent_seconds=given.silent_seconds,
        beat_seconds=given.beat_seconds,
    )
    try:
        server = await asyncio.start_server(hub.serve, given.host or None, given.port, backlog=1024)
    except OSError as error:
        sys.stdout.write(f"{error.strerror or error}\n")
        return
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    beats = asyncio.create_task(hub.beat())
    lifeline = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lifeline), sys.stdin)
    await lifeline.read()
    await hub.until_alone(LINGER_SECONDS)
    beats.cancel()
    server.close()


def main() -> None:
    """Read the arguments, which come from membership.py, and run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--start_seconds", type=float, required=True)
    parser.add_argument("--silent_seconds", type=float, default=SILENT_SECONDS)
    parser.add_argument("--beat_seconds", type=float, default=BEAT_SECONDS)
    asyncio.run(run(parser.parse_args()))
    os._exit(0)  # The service would wait for members that are gone.


if __name__ == "__main__":
    main()
