"""Reads and writes `.safetensors` files tensor by tensor, also sharded files with an index; nothing is unpickled."""

import contextlib
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from seqjax.errors import UserError
from seqjax.files import temporary_beside
from seqjax.reading import read_json
from seqjax.terminal import size

MOST_HEADER = 32 << 20  # bytes of a file's JSON header; public files stay below 1 MiB
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # float32 represents each of them exactly
PICKLED = (".bin", ".pt", ".pth")


def _safetensors() -> Any:
    """Return the safetensors package, which is an optional dependency; raise `UserError` without it."""
    try:
        import safetensors.numpy
    except ModuleNotFoundError as error:
        raise UserError("seqjax.convert needs the safetensors package: pip install 'seqjax[hf]'.") from error
    return safetensors


class Weights:
    """The tensors at `path`: a .safetensors file, a .safetensors.index.json, or a directory that holds one.

    It is a context manager. `names` holds the tensor names, `directory` the files' directory.
    """

    def __init__(self, path: Path):
        self._package = _safetensors()
        self._close = contextlib.ExitStack()
        file = find(path)
        self.path, self.directory = file, file.parent
        self._handles: dict[str, Any] = {}
        if file.name.endswith(".index.json"):
            self._open_index(file)
        else:
            handle = self._open(file)
            self._handles = dict.fromkeys(handle.keys(), handle)
        self.names = sorted(self._handles)

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *error: Any) -> None:
        self._close.close()

    def _open(self, file: Path) -> Any:
        if not file.is_file():
            raise UserError(f"There is no file {file}, which the index names; download it.")
        with file.open("rb") as opened:
            if (header := int.from_bytes(opened.read(8), "little")) > min(MOST_HEADER, file.stat().st_size):
                raise UserError(
                    f"{file} is not a complete .safetensors file: it declares a header of {size(header)}. "
                    "Download it again."
                )
        try:
            return self._close.enter_context(self._package.safe_open(file, framework="numpy"))
        except self._package.SafetensorError as error:
            raise UserError(f"{file} is not a complete .safetensors file ({error}). Download it again.") from error

    def _open_index(self, index: Path) -> None:
        shard_of = weight_map(index)
        handles = {shard: self._open(index.parent / shard) for shard in sorted(set(shard_of.values()))}
        self._handles = {name: handles[shard] for name, shard in shard_of.items()}
        in_shards = {name: shard for shard, handle in handles.items() for name in handle.keys()}  # noqa: SIM118 - no mapping
        if in_shards != shard_of:
            differing = sorted(set(in_shards.items()) ^ set(shard_of.items()))
            raise UserError(
                f"{index} and its shards disagree about {differing[0][0]} ({len(differing)} entries differ). "
                "Download them again."
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return tuple(self._handles[name].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """Return a tensor as float32.

        Raises `UserError` for a dtype that float32 cannot represent exactly, and for values that are not finite.
        """
        dtype = self._handles[name].get_slice(name).get_dtype()
        if dtype not in DTYPES:
            raise UserError(f"{name} in {self.path} is {dtype}; known: {', '.join(DTYPES)}.")
        x = self._handles[name].get_tensor(name).astype(np.float32)
        require_finite(name, x, where=str(self.path))
        return x


def weight_map(index: Path) -> dict[str, str]:
    """Return each tensor's shard; raise `UserError` if `index` is not an index of sharded weights."""
    fix = "it is not an index of sharded weights: download it again"
    shards = read_json(index, {"weight_map": {str: str}}, fix=fix)["weight_map"]
    for shard in sorted(set(shards.values())):
        if not re.fullmatch(r"[\w.-]+\.safetensors", shard):  # a plain file name, not a path or pattern
            raise UserError(f"{index} names the file {shard!r:.200}; {fix}.")
    return shards


def require_finite(name: str, x: np.ndarray, *, where: str) -> None:
    """Raise `UserError` if a tensor holds NaN or infinite values."""
    if bad := x.size - np.count_nonzero(np.isfinite(x)):
        raise UserError(
            f"{name} in {where}: {bad:,} of {x.size:,} values are NaN or infinite. Use other weights, or a checkpoint "
            "from before training diverged."
        )


def find(path: Path) -> Path:
    """Return the file that `path` refers to; raise `UserError` if there is none or it is not safetensors."""
    if path.is_dir():
        for name in ("model.safetensors.index.json", "model.safetensors"):
            if (path / name).is_file():
                return path / name
        matches = sorted(path.glob("*.safetensors"))
        if len(matches) == 1:
            return matches[0]
        pickled = sorted(file for suffix in PICKLED for file in path.glob(f"*{suffix}"))
        if pickled and not matches:
            raise _pickled(pickled[0])
        raise UserError(
            f"{path} has {len(matches)} .safetensors files and no model.safetensors(.index.json). "
            "Give the path of one file."
        )
    if not path.is_file():
        raise UserError(
            f"--weights: there is no file or directory {path}. A model on the Hugging Face hub is hf://OWNER/NAME."
        )
    if not path.name.endswith((".safetensors", ".safetensors.index.json")):
        raise _pickled(path)
    return path


def _pickled(path: Path) -> UserError:
    return UserError(
        f"--weights={path}: only .safetensors files (or their .index.json) are read. Pickled weights "
        f"({', '.join(PICKLED)}) can run code when opened; if you trust the file, save it once as safetensors."
    )


def write(tensors: dict[str, np.ndarray], path: Path, *, dtype: str) -> None:
    """Write float32 arrays as float32, bfloat16 or float16, atomically.

    Raises `UserError` if a value is not finite or overflows.
    """
    package, out = _safetensors(), {}
    for name, x in tensors.items():
        require_finite(name, x, where="the checkpoint")
        with np.errstate(over="ignore"):
            out[name] = x.astype(jnp.dtype(dtype))
        if np.isinf(out[name].astype(np.float32)).any():
            raise UserError(
                f"{name} has the value {np.abs(x).max():.3g}, which overflows {dtype}; use another --dtype."
            )
    temporary = temporary_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # transformers refuses a file without this entry.
        package.numpy.save_file(out, temporary, metadata={"format": "pt"})
        temporary.replace(path)
    except (OSError, package.SafetensorError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"Cannot write {path} ({error}); free some disk space or give another --out.") from error
