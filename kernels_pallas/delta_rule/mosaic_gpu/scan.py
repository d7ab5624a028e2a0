"""Run the delta rule with the passes over time in Pallas Mosaic GPU (kernel.py, reverse.py).

All other launches are as in `triton/scan.py`.
"""

from functools import partial

from kernels_pallas.delta_rule.mosaic_gpu.kernel import pass_over_time
from kernels_pallas.delta_rule.mosaic_gpu.reverse import pass_back_over_time
from kernels_pallas.delta_rule.triton import scan

run = partial(scan.run, passes=scan.Passes(forward=pass_over_time, reverse=pass_back_over_time))
