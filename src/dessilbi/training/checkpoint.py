"""``Checkpoint`` files: nested states as safetensors with a JSON header, checksummed, written atomically, no pickle.

A state is made of dicts, lists, tuples, tensors, NumPy arrays, numbers, strings and None: what `state_dict()` of
modules, optimizers and gradient scalers returns, and what random number generators give away.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from dessilbi import files

_KIND, _VERSION = "checkpoint", 1


def save(file: str | os.PathLike[str], state: Any) -> None:
    """Write a state, replacing an old file only when all is on disk."""
    arrays: dict[str, np.ndarray] = {}
    plain = _pack(state, arrays)
    files.save_arrays(file, _KIND, _VERSION, arrays, {"state": plain, "checksum": _checksum(plain, arrays)})


def load(file: str | os.PathLike[str]) -> Any:
    """Read a state; tensors come back on the CPU. A ValueError if the file is damaged or is something else."""
    arrays, header = files.load_arrays(file, _KIND, _VERSION)
    try:
        plain = header["state"]
        if header["checksum"] != _checksum(plain, arrays):
            raise ValueError("the checksum is wrong")
        return _unpack(plain, arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{os.fspath(file)}: damaged checkpoint ({error})") from None


def _checksum(plain: Any, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(plain).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _pack(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The JSON form of a value; its tensors go to `arrays`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Tensor, np.ndarray)):
        return _pack_array(value, arrays)
    if isinstance(value, Mapping):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: _pack(v, arrays) for k, v in value.items()}
        return {"$map": [[_pack(k, arrays), _pack(v, arrays)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [_pack(v, arrays) for v in value]}
    if isinstance(value, list):
        return [_pack(v, arrays) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be put into a checkpoint: {value!r}")


def _pack_array(value: Tensor | np.ndarray, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    name = f"{len(arrays)}"
    if isinstance(value, np.ndarray):
        arrays[name] = value
        return {"$array": name, "shape": list(value.shape)}
    arrays[name], dtype = files.array(value)
    return {"$tensor": name, "dtype": dtype, "shape": list(value.shape)}


def _unpack(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_unpack(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return files.tensor(arrays[value["$tensor"]], value["dtype"]).view(value["shape"])
    if "$array" in value:
        return arrays[value["$array"]].reshape(value["shape"])
    if "$tuple" in value:
        return tuple(_unpack(v, arrays) for v in value["$tuple"])
    if "$map" in value:
        return {_unpack(k, arrays): _unpack(v, arrays) for k, v in value["$map"]}
    return {k: _unpack(v, arrays) for k, v in value.items()}
