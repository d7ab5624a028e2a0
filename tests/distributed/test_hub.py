"""The hub and its members without JAX's devices: who is missing, lost or wrong is named to all others."""

import asyncio
import contextlib
import json
import re
import socket
import threading

import pytest

from seqjax.distributed import hub as hub_module
from seqjax.distributed import membership
from seqjax.distributed.hub import Hub
from seqjax.distributed.membership import Membership
from seqjax.distributed.place import Place
from seqjax.errors import LOST, UserError

PATIENCE = 30.0  # seconds; far longer than it takes


class Member:
    """A member that says what it is told to."""

    def __init__(self, port, index, count=2, **changes):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.lines = self.socket.makefile("r")
        hello = {"process": index, "processes": count, "host": f"h{index}", "pid": 100 + index, "versions": "jax 1"}
        self.say({"hello": hello | changes})

    def say(self, message):
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hears(self):
        """The next message that is no beat; None at the end."""
        for line in self.lines:
            if "beat" not in (message := json.loads(line)):
                return message
        return None

    def leave(self):
        self.lines.close()
        self.socket.close()


@pytest.fixture
def start(monkeypatch):
    """Start a hub in a thread; returns its port."""
    monkeypatch.setattr(Hub, "_start_service", lambda self: 7)
    loops = []

    def run(count=2, *, start_seconds=PATIENCE, silent_seconds=PATIENCE):
        ready, ports = threading.Event(), []

        async def serve():
            hub = Hub(count, start_seconds=start_seconds, silent_seconds=silent_seconds, beat_seconds=0.05)
            server = await asyncio.start_server(hub.serve, "127.0.0.1", 0)
            ports.append(server.sockets[0].getsockname()[1])
            stop, beats = asyncio.Event(), asyncio.create_task(hub.beat())
            loops.append((asyncio.get_running_loop(), stop, thread))
            ready.set()
            await stop.wait()
            beats.cancel()
            server.close()

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        assert ready.wait(PATIENCE)
        return ports[0]

    yield run
    for loop, stop, thread in loops:
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_all_are_let_go_and_leave_together(start):
    port = start()
    first = Member(port, 0)
    second = Member(port, 1)
    assert first.hears() == second.hears() == {"go": {"port": 7, "hosts": ["h0", "h1"]}}
    first.say({"done": True})
    second.say({"done": True})
    assert first.hears() == second.hears() == {"all_done": True}
    first.leave()
    second.leave()


def test_a_service_that_does_not_start_ends_all(start, monkeypatch):
    def fails(self):
        raise UserError("no port is free")

    port = start()
    monkeypatch.setattr(Hub, "_start_service", fails)
    first, second = Member(port, 0), Member(port, 1)
    for member in (first, second):
        message = member.hears()
        assert message["end"] == "JAX's coordination service does not start (UserError: no port is free)"
        assert message["status"] == 1
        member.leave()


def test_who_does_not_come_is_named(start, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-2]")
    port = start(4, start_seconds=0.3)
    first, third = Member(port, 0, 4), Member(port, 2, 4)
    for member in (first, third):
        message = member.hears()
        assert message["status"] == LOST
        assert message["end"].startswith("2 of 4 processes have come, and no other one in 0 s. Missing: process 1, 3.")
        assert "Here: 0 on h0, 2 on h2. The hosts are node[1-2]." in message["end"]
    late = Member(port, 1, 4)
    assert late.hears() == message
    assert late.hears() is None
    for member in (first, third, late):
        member.leave()


@pytest.mark.parametrize(
    ("index", "changes", "says"),
    [
        (0, {"pid": 5, "host": "b"}, "Two processes have the number 0: 100 on h0 and 5 on b. Each needs its own"),
        (1, {"processes": 3}, "Process 1 on h1 expects 3 processes, not 2."),
        (1, {"versions": "jax 2"}, "Process 1 on h1 has jax 2, another one on h0 jax 1: install the same versions"),
    ],
)
def test_who_does_not_belong_here_ends_all(start, index, changes, says):
    port = start()
    first = Member(port, 0)
    second = Member(port, index, **changes)
    for member in (second, first):
        message = member.hears()
        assert message["end"].startswith(says)
        assert message["status"] == 2
        member.leave()


def test_strangers_are_not_members(start):
    port = start()
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n")
        assert stranger.recv(10) == b""
    members = [Member(port, 0), Member(port, 1)]
    assert "go" in members[0].hears()
    for member in members:
        member.leave()


@pytest.mark.parametrize("how", ["closed", "silent", "failed"])
def test_who_is_lost_is_named_to_the_others(start, how):
    port = start(silent_seconds=0.5 if how == "silent" else PATIENCE)
    first, second = Member(port, 0), Member(port, 1)
    assert "go" in first.hears()
    done = threading.Event()

    def beat():
        with contextlib.suppress(OSError):
            while not done.wait(0.05):
                first.say({"beat": True})

    beats = threading.Thread(target=beat)
    beats.start()
    if how == "closed":
        second.leave()
    elif how == "failed":
        second.say({"failed": "no room on the disk", "status": 2})
    message = first.hears()
    done.set()
    beats.join()
    text = {"closed": "is gone without a word: it was killed,", "silent": "has not been heard of for 0 s: its host or"}
    wanted = text.get(how, "ended: no room on the disk")
    assert message["end"].startswith(f"Process 1 (pid 101) on h1 {wanted}")
    assert message["status"] == (2 if how == "failed" else LOST)
    first.leave()
    second.leave()


# --------------------------------------------------------------------------------------------- the member's end
class LeftError(BaseException):
    """In place of the end of this process."""


@pytest.fixture
def member(monkeypatch):
    """A membership whose hub is the test, the socket of that, and the statuses that the process ended with."""
    statuses = []

    def leave(status):
        statuses.append(status)
        raise LeftError

    monkeypatch.setattr(membership, "leave", leave)
    monkeypatch.setattr(membership, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(hub_module, "SILENT_SECONDS", PATIENCE)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE)
    out = Membership(Place("h0", 1, 2, 1), ours, None)
    theirs.sendall(b'{"beat": true}\n{"go": {"port": 7, "hosts": ["h0", "h1"]}}\n')
    out.start()
    yield out, theirs, statuses
    theirs.close()
    for thread in threading.enumerate():
        if thread.name == "membership _listen":
            thread.join(PATIENCE)
            assert not thread.is_alive()
    ours.close()


def wait_for(statuses):
    for _ in range(int(PATIENCE * 50)):
        if statuses:
            return
        threading.Event().wait(0.02)
    raise AssertionError("it did not end")


def test_a_member_that_is_done_waits_for_the_others(member):
    here, hub, statuses = member
    assert (here.jax_port, here.hosts) == (7, ["h0", "h1"])
    hub.sendall(b'{"all_done": true}\n')
    with here:
        pass
    assert hub.recv(100) == b'{"done": true}\n'
    assert statuses == []


def test_a_member_ends_when_another_is_lost(member, capsys):
    _, hub, statuses = member
    hub.sendall(json.dumps({"end": "Process 0 on h0 is gone.", "status": LOST}).encode() + b"\n")
    wait_for(statuses)
    assert statuses == [LOST]
    text = "error: Process 0 on h0 is gone. The same command, started again, goes on from the last checkpoint.\n"
    assert capsys.readouterr().err == text


def test_a_member_ends_when_the_hub_is_gone(member, capsys):
    _, hub, statuses = member
    hub.close()
    wait_for(statuses)
    assert statuses == [LOST]
    assert "error: The coordinator on h0 is gone. The same command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (UserError("No room."), 2, "error: No room.\n"),
        (ZeroDivisionError("by zero"), 1, "ZeroDivisionError: by zero"),
        (KeyboardInterrupt(), 130, "Interrupted."),
    ],
)
def test_a_members_own_error_is_told_to_the_others(member, error, status, says, capsys):
    here, hub, statuses = member
    with pytest.raises(LeftError), here:
        raise error
    assert statuses == [status]
    assert says in capsys.readouterr().err
    text = str(error) or type(error).__name__
    assert json.loads(hub.recv(1000)) == {"failed": text, "status": status}


def failing_save() -> UserError:
    """As Checkpoints makes it of whatever Orbax raises."""
    error = UserError("Writing to the workdir failed.")
    error.__cause__ = RuntimeError("Connection closed by peer")
    return error


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), failing_save()], ids=["sum", "save"])
def test_an_error_that_follows_from_a_loss_is_not_taken_for_the_cause(member, capsys, error):
    here, hub, statuses = member
    threading.Timer(0.05, hub.sendall, (b'{"end": "Process 0 is gone.", "status": 75}\n',)).start()
    with pytest.raises(LeftError), here:
        raise error
    assert statuses[0] == LOST
    assert capsys.readouterr().err.startswith("error: Process 0 is gone. ")


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"cannot listen on port {port}.*in use.*another port") as caught:
            membership._start_hub(Place("h0", port, 2, 0), 1.0)
    assert "--coordinator_address" in str(caught.value)


def test_a_coordinator_that_does_not_answer_is_named(monkeypatch, capsys):
    def leave(status):
        raise LeftError(status)

    monkeypatch.setattr(membership, "leave", leave)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(LeftError) as caught:
        membership._connected(Place("127.0.0.1", port, 2, 1), 0.1)
    assert caught.value.args == (LOST,)
    says = (
        rf"error: Process 0, the coordinator at 127.0.0.1:{port}, has not answered process 1 on .* for 0 s \(Connection"
    )
    assert re.match(says, capsys.readouterr().err)
