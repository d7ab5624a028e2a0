"""Device functions for tiles of U positions: splits into rows, and sums.

The state of a position, [BLOCK_E, NP], is spread over the lanes of a warp: LANES_E lanes along the channels, LANES_N
along the states. Direct sums over one axis would shuffle each number between lanes two or three times, which was a
third of all instructions. Instead, each thread sums its own entries. The partial sums of U positions are then joined
and halved until one is left. `tl.split` leaves both halves in one thread, so the compiler moves the joined sums through
shared memory only once. The lane counts match the layout that the compiler chooses; with another layout the sums would
only be slower.
"""

import triton
import triton.language as tl

from kernels_pallas.triton.tile_io import LOG2_E


@triton.jit
def load_rows(ptr, t, T: tl.constexpr, N: tl.constexpr, n_N, U: tl.constexpr):
    """Return rows t to t + U - 1 of [T, N] as a tuple; zeros from T and N on."""
    rows = ()
    for i in tl.static_range(U):
        rows += (tl.load(ptr + (t + i) * N + n_N, mask=(n_N < N) & (t + i < T), other=0.0),)
    return rows


@triton.jit
def step_sizes(dt_EU, bias_E, t_U, T: tl.constexpr, SOFTPLUS: tl.constexpr):
    """Return dt, or with SOFTPLUS softplus(dt + bias) and zero from T on.

    log(1 + y) / y on [0, 1] is a polynomial through 9 Chebyshev points: its error is 3e-8, in float32 2e-7.
    """
    if SOFTPLUS:
        z_EU = dt_EU.to(tl.float32) + bias_E[:, None]
        y_EU = tl.exp2(tl.abs(z_EU) * -LOG2_E)
        p_EU = (0.005126102361828089 * y_EU - 0.029074065387248993) * y_EU + 0.0775160863995552
        p_EU = (p_EU * y_EU - 0.13602247834205627) * y_EU + 0.19076880812644958
        p_EU = (p_EU * y_EU - 0.2483539879322052) * y_EU + 0.3331812024116516
        p_EU = (p_EU * y_EU - 0.4999944567680359) * y_EU + 0.9999999403953552
        dt_EU = tl.where((t_U < T)[None, :], p_EU * y_EU + tl.maximum(z_EU, 0.0), 0.0)
    return dt_EU


@triton.jit
def softplus_slope(dt_EU, bias_E, t_U, T: tl.constexpr):
    """Return the derivative of `step_sizes` with SOFTPLUS."""
    z_EU = dt_EU.to(tl.float32) + bias_E[:, None]
    y_EU = tl.exp2(tl.abs(z_EU) * -LOG2_E)
    return tl.where((t_U < T)[None, :], tl.where(z_EU >= 0.0, 1.0, y_EU) / (1.0 + y_EU), 0.0)


@triton.jit
def split_rows(x_EU, U: tl.constexpr):
    """Return the U columns of a tile, each [E], as a tuple; U is 2, 4 or 8."""
    rows = (x_EU,)
    for level in tl.static_range(3):
        if U >> level > 1:
            first = ()
            second = ()
            for i in tl.static_range(1 << level):
                if U >> level == 2:
                    even, odd = tl.split(rows[i])
                else:
                    even, odd = tl.split(tl.reshape(rows[i], [x_EU.shape[0], U >> (level + 1), 2]))
                first += (even,)
                second += (odd,)
            rows = first + second
    return rows


@triton.jit
def part_over_channels(x_EN, LANES_E: tl.constexpr):
    """Return [LANES_E, N]: each thread's sums over its channels."""
    return tl.sum(tl.reshape(x_EN, [x_EN.shape[0] // LANES_E, LANES_E, x_EN.shape[1]]), 0)


@triton.jit
def part_over_states(x_EN, LANES_N: tl.constexpr):
    """Return [E, LANES_N]: each thread's sums over its states."""
    return tl.sum(tl.reshape(x_EN, [x_EN.shape[0], LANES_N, x_EN.shape[1] // LANES_N]), 2)


@triton.jit
def over_channels(parts, LANES_E: tl.constexpr, U: tl.constexpr):
    """Return [N, U] from the partial sums of U positions, [LANES_E, N] each."""
    return _halved(tl.permute(_joined(parts, U), [1, 2, 0]), LANES_E)


@triton.jit
def over_states(parts, LANES_N: tl.constexpr, U: tl.constexpr):
    """Return [E, U] from the partial sums of U positions, [E, LANES_N] each."""
    return _halved(tl.permute(_joined(parts, U), [0, 2, 1]), LANES_N)


@triton.jit
def _joined(parts, U: tl.constexpr):
    """Return [.., .., U] from U tiles."""
    for level in tl.static_range(3):
        if U >> level > 1:
            pairs = ()
            for i in tl.static_range(U >> (level + 1)):
                pairs += (tl.join(parts[i], parts[i + (U >> (level + 1))]),)
            parts = pairs
    return tl.reshape(parts[0], [parts[0].shape[0], parts[0].shape[1], U])


@triton.jit
def _halved(x, M: tl.constexpr):
    """Return the sum over the last of three axes, with M entries."""
    for level in tl.static_range(8):
        if M >> level > 1:
            first, second = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], M >> (level + 1), 2]))
            x = first + second
    return tl.reshape(x, [x.shape[0], x.shape[1]])
