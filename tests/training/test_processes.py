"""Stop requests: the first signal requests a stop, a second SIGINT interrupts, handlers are restored."""

import os
import signal

import jax
import orbax.checkpoint as ocp
import pytest

from seqjax.training.processes import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_requests_a_stop(number):
    old_handler = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), number)
        assert stop.agreed()
        assert stop.name == number.name
    assert signal.getsignal(number) is old_handler


def test_second_interrupt_raises():
    with StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # schedulers repeat SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_restored_after_an_error():
    old_handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(ZeroDivisionError), StopRequest():
        raise ZeroDivisionError
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == old_handlers


def test_distributed_stop_uses_jax_preemption(monkeypatch):
    """JAX owns the SIGTERM handler in distributed runs; the test replaces it with a recorder."""
    agreement_steps, terminations = [], []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(ocp.multihost, "reached_preemption", lambda step: agreement_steps.append(step) or step == 3)
    old_handler = signal.signal(signal.SIGTERM, lambda *_: terminations.append(True))
    try:
        with StopRequest() as stop:
            assert [stop.agreed() for _ in range(3)] == [False, False, True]
            assert agreement_steps == [1, 2, 3]
            assert stop.name == "a signal to one of the processes"
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert (stop.name, terminations) == ("SIGINT", [True])
            assert not stop.agreed(), "the other processes have not agreed"
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, old_handler)
