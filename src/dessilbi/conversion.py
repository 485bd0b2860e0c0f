"""Sparse linear layers for inference in torch, each offered with its measured speed.

    done = to_csr(model, images, max_density=0.1)       # a copy, with the layers as CSR that are faster so
    done.model, done.speed.ratio, done.control.ratio    # beside the dense network, and what the ratio of a copy is
    for layer in done.layers: ...                       # name, density, speed, control, converted

    to_semi_structured(model, images)                   # 2:4, where the GPU has it

Dense layer, its copy and the sparse one are timed in one process, in turns. A layer stays dense where the sparse one
was not faster, unless `force` is given.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dessilbi import files, inputs
from dessilbi.timing import Speed, compare, interleave


class _Selection(Protocol):
    def masks(self, model: nn.Module) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class Layer:
    """A linear layer, its fraction of weights that are not zero, and the speed of its sparse form."""

    name: str
    density: float
    speed: Speed
    control: Speed
    converted: bool


@dataclass(frozen=True)
class Conversion:
    """The converted copy, the layers that could be, and the speed of the whole beside the dense network."""

    model: nn.Module
    layers: tuple[Layer, ...]
    speed: Speed
    control: Speed

    @property
    def converted(self) -> tuple[str, ...]:
        """The names of the layers that are sparse now."""
        return tuple(layer.name for layer in self.layers if layer.converted)


class CSRLinear(nn.Module):
    """A linear layer that stores only the weights that are not zero (compressed sparse rows). For inference."""

    rows: Tensor
    columns: Tensor
    values: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, nonzero: int, bias: bool) -> None:
        super().__init__()
        _hush()
        self.in_features, self.out_features = in_features, out_features
        # Plain tensors, not one of sparse layout: they copy, move and travel as any other.
        self.register_buffer("rows", torch.zeros(out_features + 1, dtype=torch.int32))
        self.register_buffer("columns", torch.zeros(nonzero, dtype=torch.int32))
        self.register_buffer("values", torch.zeros(nonzero))
        self.register_buffer("bias", torch.zeros(out_features) if bias else None)

    @classmethod
    def of(cls, linear: nn.Linear) -> CSRLinear:
        """The same layer, from its weights now."""
        _hush()
        weight = linear.weight.detach().to_sparse_csr()
        made = cls(linear.in_features, linear.out_features, weight.values().numel(), linear.bias is not None)
        made.rows, made.columns = weight.crow_indices().int(), weight.col_indices().int()
        made.values = weight.values().clone()
        made.bias = None if linear.bias is None else linear.bias.detach().clone()
        return made

    def forward(self, x: Tensor) -> Tensor:
        size = (self.out_features, self.in_features)
        weight = torch.sparse_csr_tensor(self.rows, self.columns, self.values, size, check_invariants=False)
        flat = x.reshape(-1, self.in_features)
        if len(flat) == 1:
            y = torch.mv(weight, flat[0]).unsqueeze(0)
            y = y if self.bias is None else y + self.bias
        elif self.bias is None:
            y = (weight @ flat.t()).t()
        else:
            y = torch.addmm(self.bias.unsqueeze(1), weight, flat.t()).t()
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, nonzero={len(self.values)},"
            f" bias={self.bias is not None}"
        )


def to_csr(
    model: nn.Module,
    example_inputs: Any,
    *,
    max_density: float = 0.5,
    selection: _Selection | None = None,
    force: bool = False,
    rounds: int = 20,
) -> Conversion:
    """Store linear layers as CSR of which at most `max_density` of the weights are not zero.

    What is faster depends on the batch: example_inputs should have the one that will be used. A `selection` is applied
    to the copy first; the model stays as it is.
    """
    if not 0 < max_density <= 1:
        raise ValueError(f"max_density = {max_density}: give a fraction above 0 and at most 1")
    network = _copy(model)
    if selection is not None:
        with torch.no_grad():
            for name, mask in selection.masks(network).items():
                network.get_parameter(name).mul_(mask.to(network.get_parameter(name).device))
    chosen = {name: layer for name, layer in _linear(network).items() if density(layer.weight) <= max_density}
    if not chosen:
        found = {name: density(layer.weight) for name, layer in _linear(network).items()}
        least = min(found, key=found.__getitem__, default=None)
        has = "no linear layers" if least is None else f"the sparsest, {least!r}, has {found[least]:.3g}"
        raise ValueError(f"no linear layer has at most {max_density:g} of its weights ({has}): prune it first")
    return _converted(network, chosen, CSRLinear.of, example_inputs, force, rounds)


def to_semi_structured(model: nn.Module, example_inputs: Any, *, force: bool = False, rounds: int = 20) -> Conversion:
    """Store linear layers that are 2:4 (at most two of every four weights in a row are not zero) for the GPU's sparse
    matrix units: compute capability 8.0 or later; float16, bfloat16 or int8, float32 only where torch allows it.

    Only large products gain. On an H200 (torch 2.11) a call costs 0.45 ms before it starts: 8192 x 8192 weights at 8192
    rows ran 1.3 (float16) to 1.5 times (bfloat16) as fast, 4096 x 2048 at 1024 rows at a twentieth of the speed.
    """
    network = _copy(model)
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        raise ValueError(f"2:4 sparsity needs a GPU and the model is on {device}: move the model and the inputs there")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"2:4 sparsity needs compute capability 8.0 and {name} has {major}.{minor}: use to_csr")
    chosen = {name: layer for name, layer in _linear(network).items() if is_2_4(layer.weight)}
    if not chosen:
        named = next(iter(_linear(network)), None)
        has = "it has no linear layers" if named is None else f"{named!r} is not, nor is any other"
        raise ValueError(
            f"no linear layer of the model is 2:4 ({has}): keep at most two of every four neighbouring weights of a row"
        )
    return _converted(network, chosen, _semi_structured, example_inputs, force, rounds)


def is_2_4(weight: Tensor) -> bool:
    """At most two of every four neighbours in a row are not zero."""
    if weight.shape[-1] % 4:
        return False
    return bool((weight.detach().reshape(-1, 4) != 0).sum(1).le(2).all())


def density(weight: Tensor) -> float:
    """The fraction of the elements that are not zero."""
    return float(weight.detach().count_nonzero()) / max(weight.numel(), 1)


def save_csr(converted: nn.Module, file: str | os.PathLike[str]) -> dict[str, Any]:
    """Write the weights of a network with CSR layers, for :func:`load_csr`. Returns the facts of `to_safetensors`."""
    from dessilbi.export import to_safetensors

    layers = {
        name: [m.in_features, m.out_features, len(m.values), m.bias is not None]
        for name, m in converted.named_modules()
        if isinstance(m, CSRLinear)
    }
    return to_safetensors(converted, file, {"csr": layers})


def load_csr(model: nn.Module, file: str | os.PathLike[str]) -> nn.Module:
    """A copy of the dense network with the CSR layers and all weights of a file by :func:`save_csr`, in eval mode."""
    arrays, header = files.load_arrays(file, "weights", 1)
    if not isinstance(header.get("csr"), dict):
        raise ValueError(f"{os.fspath(file)}: holds no CSR layers: load it with load_state_dict")
    network = _copy(model)
    for name, (in_features, out_features, nonzero, bias) in header["csr"].items():
        _put(network, name, CSRLinear(in_features, out_features, nonzero, bias))
    state = network.state_dict()
    missing = sorted(state.keys() - arrays.keys())
    if missing or arrays.keys() - state.keys():
        name = missing[0] if missing else sorted(arrays.keys() - state.keys())[0]
        raise ValueError(f"{os.fspath(file)}: {name!r} is only in {'the model' if missing else 'the file'}")
    network.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    return network


def _converted(
    network: nn.Module,
    chosen: Mapping[str, nn.Linear],
    convert: Callable[[nn.Linear], nn.Module],
    example_inputs: Any,
    force: bool,
    rounds: int,
) -> Conversion:
    """Measure each layer on what it gets in the network, convert those that gain, measure the whole."""
    args, kwargs = inputs.split(example_inputs)
    device = str(chosen[next(iter(chosen))].weight.device)
    sparse, twin = copy.deepcopy(network), copy.deepcopy(network)
    layers = []
    with torch.inference_mode():
        seen = _seen(network, chosen, args, kwargs)
    for name, linear in chosen.items():
        if name not in seen:
            raise ValueError(f"{name!r} is not called in forward on these example_inputs: its speed is unknown")
        made = convert(linear)
        work = {"dense": linear, "control": twin.get_submodule(name), "sparse": made}
        speeds = _speeds(work, (seen[name],), {}, device, rounds)
        faster = speeds["sparse"].ratio_quartiles[0] > 1
        layers.append(Layer(name, density(linear.weight), speeds["sparse"], speeds["control"], force or faster))
        if force or faster:
            _put(sparse, name, made)
    speeds = _speeds({"dense": network, "control": twin, "sparse": sparse}, args, kwargs, device, rounds)
    return Conversion(sparse, tuple(layers), speeds["sparse"], speeds["control"])


@torch.inference_mode()
def _speeds(
    modules: Mapping[str, nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any], device: str, rounds: int
) -> dict[str, Speed]:
    work = {name: partial(module, *args, **kwargs) for name, module in modules.items()}
    return compare(interleave(work, rounds, device=device), "dense")


def _seen(
    network: nn.Module, chosen: Mapping[str, nn.Linear], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """What each layer is given on these inputs, the last time it is called."""
    found: dict[str, Tensor] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            found[name] = given[0].clone()

        return hook

    hooks = [layer.register_forward_pre_hook(note(name)) for name, layer in chosen.items()]
    try:
        network(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _semi_structured(linear: nn.Linear) -> nn.Module:
    made = copy.deepcopy(linear)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is a prototype
            weight = torch.sparse.to_sparse_semi_structured(made.weight.detach())
    except (RuntimeError, ValueError) as error:  # sizes and types that the units do not take
        shape, dtype = tuple(made.weight.shape), str(made.weight.dtype).removeprefix("torch.")
        raise ValueError(f"a {dtype} weight of shape {shape} cannot be 2:4: {str(error).splitlines()[0]}") from error
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def _linear(network: nn.Module) -> dict[str, nn.Linear]:
    # Only the class itself: what derives from it may do something else in forward.
    return {name: module for name, module in network.named_modules() if type(module) is nn.Linear}


def _put(network: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, module.eval())


def _hush() -> None:
    """Torch says once a process that its CSR is in beta; here is where nobody needs to hear it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.zeros(1, 1).to_sparse_csr()


def _copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(getattr(model, "_orig_mod", model)).eval()
