"""Compile the training step for absent GPUs: memory and bytes exchanged per GPU.

    python -m lab.benchmarks.described [--devices=4] [--mixers=a,b]
    python -m lab.benchmarks.described --devices=8 --layouts=fsdp --size=1b3 --batch=4

This runs on a machine without a GPU, with `pip install 'seqjax[cuda13]'`. It lowers the step from
`benchmarks.train_step`, with its flags, using the fused kernels. Then it compiles the step ahead of time for one and
for N virtual H200s. Matrix products are not autotuned, because no GPU is present. Nothing runs, so there are no times.
lab/results/devices.md compares the results with real GPUs.
"""

from benchmarks.harness import options

FLAGS = options.flags(__doc__)
options.add_models(FLAGS)
FLAGS.add_argument("--devices", type=int, default=4, help="GPUs of one host (4)")
FLAGS.add_argument("--layouts", type=options.words, default=["data"], help="data, fsdp, seq (data)")
options.parse_early(FLAGS, __name__)

import dataclasses
import os
from typing import Any

import jax
from jax.experimental import topologies

from benchmarks import train_step
from benchmarks.harness import report
from benchmarks.harness.configs import chosen, configured
from benchmarks.harness.machine import machine
from seqjax.command_line import run_command
from seqjax.errors import UserError
from seqjax.sharding import make_mesh

CAPABILITY = 90
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 device_memory_size: 150000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
TABLE = report.Table(
    40,
    (
        report.Column("compiled_bytes", "GiB", ">8.2f", 2**-30),
        report.Column("temp_bytes", "temporary", ">11.2f", 2**-30),
        report.Column("exchanged_bytes", "exch. MB", ">10.1f", 1e-6),
    ),
)


def described(n_devices: int) -> list[Any]:
    """Return `n_devices` virtual H200s on one host; raise `UserError` if JAX has no CUDA plugin."""
    try:
        topology = topologies.get_topology_desc("", platform="cuda", target_config=H200, topology=f"1x1x{n_devices}")
    except (NotImplementedError, RuntimeError) as error:
        raise UserError(
            f"JAX cannot compile for a GPU here ({error}). Install its CUDA plugin: pip install 'seqjax[cuda13]'."
        ) from None
    return list(topology.devices)


def begin() -> None:
    """Let JAX start without a GPU or driver; call it before JAX looks for devices."""
    os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')}"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    jax.config.update("jax_platforms", "cpu")


def pretend() -> None:
    """Make backend selection and jax-triton see the virtual GPU."""
    import jaxlib.gpu_triton as records

    from kernels_pallas import device

    jax.default_backend = lambda: "gpu"
    device.compute_capability = lambda: CAPABILITY
    setattr(records, "get_compute_capability", lambda device: CAPABILITY)  # noqa: B010 - pyright knows no such name


def main(argv: list[str]) -> None:
    """Compile each model; print and write each result."""
    args = FLAGS.parse_args(argv)
    options.check_known("layouts", args.layouts, ["data", "fsdp", "seq"])
    begin()
    devices, compiled_on = described(args.devices), machine()
    pretend()
    settings = {name: getattr(args, name) for name in ("size", "batch", "seq_len", "remat", "devices")}
    written: dict[str, Any] = {"machine": compiled_on, "settings": settings, "results": {}}
    path = options.destination(args.json, f"described_{args.devices}_devices", recorded=not args.mixers)
    print(TABLE.header())
    for name in chosen(args.mixers):
        config = configured(name, args.size, batch=args.batch, seq_len=args.seq_len, remat=args.remat)
        for layout, laid_out in train_step.layouts(config, args.devices, args.layouts).items():
            try:
                mesh = make_mesh(**dataclasses.asdict(laid_out.mesh), devices=devices[: args.devices if layout else 1])
                result = train_step.of_program(train_step.lower(laid_out, mesh).lowered.compile())
            except (RuntimeError, ValueError, TypeError, NotImplementedError, UserError) as error:
                result = {"error": f"{type(error).__name__}: {error}"}
            written["results"][f"{name} {layout}".rstrip()] = result
            print(TABLE.row(train_step.title_of(name, layout), result), flush=True)
            report.save(path, written)
    print(f"Wrote {path}.")


if __name__ == "__main__":
    run_command(main)
