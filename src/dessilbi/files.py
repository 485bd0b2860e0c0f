"""How nouns travel: safetensors with a JSON header, written atomically, loaded without running code.

Torch is imported only where its tensors travel: the process that times onnxruntime reads files without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

if TYPE_CHECKING:
    import torch

_KEY = "dessilbi"
_NUMPY = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


def write_atomically(file: str | os.PathLike[str], data: bytes) -> None:
    """Replace a file by `data` in one step: a crash, a full disk or an interrupt leaves the old file as it was."""
    target = FilePath(file)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    if os.name == "posix":  # the rename itself must reach the disk too
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def save_arrays(
    file: str | os.PathLike[str], kind: str, version: int, arrays: Mapping[str, np.ndarray], header: Mapping[str, Any]
) -> None:
    """Write arrays and a JSON header that says which kind of file this is and which version of its format."""
    described = json.dumps({**header, "kind": kind, "version": version})
    # ascontiguousarray would give an array without axes one.
    contiguous = {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in arrays.items()}
    write_atomically(file, save(contiguous, metadata={_KEY: described}))


def load_arrays(file: str | os.PathLike[str], kind: str, version: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the header of a file written by `save_arrays`; a ValueError of one line where it is not one."""
    if not os.path.isfile(file):
        raise FileNotFoundError(f"{os.fspath(file)}: no such file")
    try:
        with safe_open(os.fspath(file), framework="numpy") as opened:
            header = json.loads((opened.metadata() or {}).get(_KEY, "null"))
            foreign = not isinstance(header, dict) or header.get("kind") != kind
            newer = not foreign and header["version"] > version
            arrays = {} if foreign or newer else {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{os.fspath(file)}: truncated or not a dessilbi {kind} file ({error})") from None
    if foreign:
        found = header.get("kind") if isinstance(header, dict) else None
        raise ValueError(f"{os.fspath(file)}: not a dessilbi {kind} file" + (f" but a {found}" if found else ""))
    if newer:
        raise ValueError(
            f"{os.fspath(file)}: {kind} format {header['version']} is newer than {version}, the last this version reads"
        )
    return arrays, header


def array(value: torch.Tensor) -> tuple[np.ndarray, str]:
    """The elements of a tensor in a row, and its dtype; NumPy has no bfloat16 and no float8: their bytes."""
    import torch

    dtype = str(value.dtype).removeprefix("torch.")
    flat = value.detach().cpu().contiguous().view(-1)
    return (flat if dtype in _NUMPY else flat.view(torch.uint8)).numpy(), dtype


def tensor(flat: np.ndarray, dtype: str) -> torch.Tensor:
    """The elements that `array` made a row of."""
    import torch

    if not isinstance(kind := getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"there is no dtype {dtype!r}")
    return torch.from_numpy(flat.copy()).view(kind)
