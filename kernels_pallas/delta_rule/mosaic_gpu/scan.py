"""Run the delta rule with the pass over time in Pallas Mosaic GPU (kernel.py).

All other launches and the gradients are as in `triton/scan.py`.
"""

from functools import partial

from kernels_pallas.delta_rule.mosaic_gpu.kernel import pass_over_time
from kernels_pallas.delta_rule.triton import scan

run = partial(scan.run, passes=scan.Passes(forward=pass_over_time))
