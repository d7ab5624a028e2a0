"""The progress line of a training run."""

import io

import pytest

from seqjax.terminal import duration
from seqjax.training.train_log import Progress


class Stream(io.TextIOWrapper):
    """A text stream in memory that can act as a terminal."""

    def __init__(self, *, terminal=False):
        super().__init__(io.BytesIO(), newline="", write_through=True)
        self.terminal = terminal

    def isatty(self):
        return self.terminal

    def getvalue(self):
        return self.buffer.getvalue().decode()


def update(progress, step):
    progress.update(step, loss=2.5, tokens_per_s=12345.6, mfu=0.4217, eta=75)


def test_terminal_progress_rewrites_one_line():
    stream = Stream(terminal=True)
    progress = Progress(10, stream=stream)
    update(progress, 1)
    update(progress, 10)
    progress.say("evaluated")
    text = stream.getvalue()
    assert "step 1/10 | training loss 2.500 nats/token | 12,346 tokens/s | MFU 42.2% | ETA 1m15s" in text
    assert text.count("\n") == 1
    assert text.endswith("\revaluated\n")


def test_file_progress_has_few_lines():
    stream = Stream()
    progress = Progress(100, stream=stream)
    for step in range(1, 101):
        update(progress, step)
    lines = stream.getvalue().splitlines()
    assert [line.split(" |")[0] for line in lines] == ["step 1/100", "step 100/100"]
    assert "\r" not in stream.getvalue()


def test_quiet_progress_prints_nothing():
    stream = Stream()
    progress = Progress(10, quiet=True, stream=stream)
    update(progress, 10)
    progress.say("evaluated")
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (75, "1m15s"), (3600, "1h00m"), (-3, "0s")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text
