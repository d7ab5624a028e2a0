"""Run the delta rule with the passes over time and the input gradients in Pallas Mosaic GPU.

Forward: kernel.py; backward: reverse.py and gradients.py. All other launches are as in `triton/scan.py`.
"""

from functools import partial

from kernels_pallas.delta_rule.mosaic_gpu.gradients import gradients
from kernels_pallas.delta_rule.mosaic_gpu.kernel import pass_over_time
from kernels_pallas.delta_rule.mosaic_gpu.reverse import pass_back_over_time
from kernels_pallas.delta_rule.triton import scan

PASSES = scan.Passes(forward=pass_over_time, reverse=pass_back_over_time, gradients=gradients)
run = partial(scan.run, passes=PASSES)
