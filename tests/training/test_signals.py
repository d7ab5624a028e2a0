"""A signal is a request first and an interruption second, and the handlers that were there come back."""

import os
import signal

import pytest

from seqjax.training.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_noted(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.agreed(1)
        os.kill(os.getpid(), number)
        assert stop.agreed(2)
        assert stop.name == number.name
    assert signal.getsignal(number) is before


def test_a_second_interrupt_is_not_asked_twice():
    with StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler repeats itself
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_come_back_after_an_error():
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(ZeroDivisionError), StopRequest():
        raise ZeroDivisionError
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before
