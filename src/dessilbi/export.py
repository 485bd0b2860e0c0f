"""A network as a file for others: ONNX, torch.export, safetensors. A file is written only after it was read back and
gave the network's own outputs.

    to_onnx(model, images, "net.onnx")          # any batch size; checked with onnxruntime
    to_export(model, images, "net.pt2")         # torch.export
    to_safetensors(model, "net.safetensors")    # the weights alone

Conversions that stay in torch, offered with their measured speed, are in :mod:`dessilbi.conversion`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dessilbi import files, inputs
from dessilbi.conversion import to_csr, to_semi_structured

__all__ = ["to_csr", "to_export", "to_onnx", "to_safetensors", "to_semi_structured"]

_Run = Callable[[tuple[Any, ...], dict[str, Any]], list[Tensor]]
_PROTOBUF_LIMIT = 2**31 - 2**20  # what the format allows, less some room for the graph


def to_onnx(
    model: nn.Module,
    example_inputs: Any,
    file: str | os.PathLike[str],
    *,
    tolerance: float = 1e-4,
    opset: int | None = None,
) -> dict[str, Any]:
    """Write the network, in eval mode, as ONNX whose first dimension is any `batch`.

    onnxruntime runs what would be written on random inputs of other batch sizes than the example's. Where its outputs
    differ from torch's by more than `tolerance`, as a fraction of the largest output, a ValueError says by how much
    and there is no file. The model stays as it is.

    Returns the facts: file, bytes, opset, difference (the largest found), batches (those tried).
    """
    runtime = _onnxruntime()
    network = _frozen(model).cpu()
    example = inputs.moved(example_inputs, "cpu")
    size = sum(t.numel() * t.element_size() for t in network.state_dict().values())
    if size > _PROTOBUF_LIMIT:
        raise ValueError(f"{file}: {size / 1e9:.1f} GB of weights; one ONNX file holds 2 GB: use torch.export instead")
    args, kwargs, shapes = _exported_inputs(example, torch.export.Dim("batch"))
    with _quiet(), _one_line(file, "ONNX cannot take this network"):
        program = torch.onnx.export(
            network, args, kwargs=kwargs, dynamic_shapes=shapes, opset_version=opset, dynamo=True, verbose=False
        )
        assert program is not None
        data = program.model_proto.SerializeToString()
        versions = {entry.domain: entry.version for entry in program.model_proto.opset_import}
        session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])

    names = [entry.name for entry in session.get_inputs()]

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        tensors = {k: v for k, v in kwargs.items() if k in names} or dict(
            zip(names, [v for v in args if isinstance(v, Tensor)], strict=True)
        )
        return [torch.from_numpy(v) for v in session.run(None, {k: v.numpy() for k, v in tensors.items()})]

    facts = _verified(network, run, example, tolerance, file, "onnxruntime")
    files.write_atomically(file, data)
    return {"file": os.fspath(file), "bytes": len(data), "opset": versions[""], **facts}


def to_export(
    model: nn.Module, example_inputs: Any, file: str | os.PathLike[str], *, tolerance: float = 1e-5
) -> dict[str, Any]:
    """Write the network, in eval mode, for `torch.export.load`, with any batch size; checked as in :func:`to_onnx`.

    It runs on the device that the model is on. Returns the facts: file, bytes, difference, batches.
    """
    network = _frozen(model)
    data = exported(network, example_inputs, file)
    with _quiet():
        read_back = torch.export.load(io.BytesIO(data)).module()

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        return _tensors(read_back(*args, **kwargs))

    facts = _verified(network, run, example_inputs, tolerance, file, "the file")
    files.write_atomically(file, data)
    return {"file": os.fspath(file), "bytes": len(data), **facts}


def exported(network: nn.Module, example_inputs: Any, name: str | os.PathLike[str]) -> bytes:
    """What `torch.export.save` writes of a network in eval mode; `name` is what an error calls it."""
    # Without a name, which would stand for every size there is: kernels of a GPU have a largest one.
    args, kwargs, shapes = _exported_inputs(example_inputs, torch.export.Dim.DYNAMIC)
    written = io.BytesIO()
    with _quiet(), _one_line(name, "torch.export cannot take this network"), torch.no_grad():
        torch.export.save(torch.export.export(network, args, kwargs, dynamic_shapes=shapes), written)
    return written.getvalue()


def to_safetensors(
    model: nn.Module, file: str | os.PathLike[str], header: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write the `state_dict` with a header that says what it is; `header` adds to it (plain JSON values).

    Tensors that share memory are written once; `safetensors.torch.load_model` ties them again.
    Returns the facts: file, bytes, tensors.
    """
    from safetensors.torch import load, save

    state = {name: t.detach() for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    described = {**(header or {}), "kind": "weights", "version": 1}
    # "format", and an entry from the name left out to the one kept, are what safetensors.torch and its users look for.
    metadata = {"format": "pt", "dessilbi": json.dumps(described)}
    first: dict[tuple[Any, ...], str] = {}
    kept = {}
    for name, tensor in state.items():
        same = first.setdefault(_place(name, tensor), name)
        if same == name:
            kept[name] = tensor.cpu().contiguous().clone()  # views of one memory are written each on its own
        else:
            metadata[name] = same
    data = save(kept, metadata)
    read_back = load(data)
    wrong = [name for name, tensor in kept.items() if not _identical(read_back[name], tensor)]
    if wrong:
        raise ValueError(f"{file}: {wrong[0]!r} is not what was read back: nothing was written")
    files.write_atomically(file, data)
    return {"file": os.fspath(file), "bytes": len(data), "tensors": len(kept)}


def _place(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same numbers in the same memory."""
    if not tensor.numel():
        return (name,)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _identical(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _frozen(model: nn.Module) -> nn.Module:
    """A copy in eval mode; of a compiled network, what was compiled."""
    plain = getattr(model, "_orig_mod", model)
    return copy.deepcopy(plain).eval()


def _exported_inputs(example_inputs: Any, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Positional and named arguments of two examples at least, and which of their dimensions vary."""
    size = inputs.batch_size(example_inputs)
    # A batch of one would be taken for a constant.
    args, kwargs = inputs.split(example_inputs) if size > 1 else inputs.random_like(example_inputs, 2)
    example: Any = args or kwargs

    def varies(value: Any) -> Any:
        return {0: batch} if inputs.batched(example, value) else None

    shapes: Any = {k: varies(v) for k, v in kwargs.items()} if kwargs else tuple(varies(v) for v in args)
    return args, kwargs, shapes


def _tensors(outputs: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(outputs) if isinstance(value, Tensor)]


def _verified(
    network: nn.Module, run: _Run, example_inputs: Any, tolerance: float, file: str | os.PathLike[str], what: str
) -> dict[str, Any]:
    """Compare on random inputs of batch sizes that were not traced; a ValueError where the outputs differ."""
    traced = max(2, inputs.batch_size(example_inputs))
    batches = [size for size in (1, 3, 5) if size not in (traced, inputs.batch_size(example_inputs))]
    largest = 0.0
    for size in batches:
        args, kwargs = inputs.random_like(example_inputs, size, seed=size)
        with torch.no_grad():
            with _one_line(file, f"the network does not run at batch {size}"):
                expected = _tensors(network(*args, **kwargs))
            with _one_line(file, f"{what} does not run at batch {size}"):
                found = run(args, kwargs)
        largest = max(largest, _difference(expected, found, f"{file}: at batch {size}"))
    if not largest <= tolerance:
        raise ValueError(
            f"{file}: not written: the outputs of {what} differ from the network's by {largest:.2g} of the largest"
            f" output; tolerance is {tolerance:g}"
        )
    return {"difference": largest, "batches": batches}


def _difference(expected: list[Tensor], found: list[Tensor], where: str) -> float:
    """The largest difference, as a fraction of the largest output."""
    wanted, given = [tuple(t.shape) for t in expected], [tuple(t.shape) for t in found]
    if wanted != given:
        raise ValueError(f"{where} the outputs have the shapes {given}, the network's {wanted}: nothing was written")
    largest = 0.0
    for one, other in zip(expected, found, strict=True):
        if not one.numel():
            continue
        reference, measured = one.detach().double().cpu(), other.detach().double().cpu()
        if not reference.isfinite().all():
            raise ValueError(f"{where} the network's own outputs are not finite: there is nothing to compare with")
        gap = (reference - measured).abs().max().nan_to_num(torch.inf)
        largest = max(largest, float(gap / reference.abs().max().clamp_min(torch.finfo(torch.float32).tiny)))
    return largest


def _onnxruntime() -> Any:
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(f"ONNX needs {error.name}: pip install 'dessilbi[onnx]'") from None
    return onnxruntime


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's notes on packages and deprecations that concern only itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _one_line(file: str | os.PathLike[str], problem: str) -> Iterator[None]:
    """The exporters explain themselves over pages: the cause is what counts."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        raise ValueError(f"{Path(file).name}: {problem}: {text}") from error
