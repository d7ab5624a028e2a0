"""Times torch's FlashAttention with CUDA events, for benchmarks.kernels."""

import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.harness.limits import Sizes


def is_available() -> bool:
    """Return whether a torch with CUDA is installed and sees a device."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def measure(n: Sizes, *, training: bool, repeats: int, seconds: float) -> dict[str, Any]:
    """Return causal attention on the flash backend, forward or forward with backward."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    generator = torch.Generator("cuda").manual_seed(0)
    shape = (n.B, n.H, n.T, n.K)
    q, k, v, do = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator, requires_grad=training and i < 3)
        for i in range(4)
    )

    def call() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.set_grad_enabled(training):
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        if training:
            torch.autograd.grad(o, (q, k, v), do)

    runs = time_ms(call, repeats=repeats, seconds=seconds)
    return {"ms": statistics.median(runs), "runs": runs, "versions": {"torch": torch.__version__}}


def time_ms(call: Callable[[], Any], *, repeats: int, seconds: float) -> list[float]:
    """Return milliseconds per call, one value per repeat of about `seconds`."""
    import torch

    def timed(calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / calls

    timed(1)
    calls = max(1, min(100, round(1e3 * seconds / timed(1))))
    return [timed(calls) for _ in range(repeats)]
