"""A model's parameters by the role they play: which are penalised, and in which groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from dessilbi.groups import Partition, Slices, partition, transposed_filters

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def param_groups(
    model: nn.Module,
    conv: str | Partition | None = "filter",
    linear: str | Partition | None = "weight",
    exclude: Iterable[str | Tensor | nn.Module] = (),
    example_inputs: Any = None,
) -> list[dict[str, Any]]:
    """Sort a model's parameters into param groups by the role they play.

    Args:
        model: any module.
        conv: the group kind of convolution weights, transposed and grouped ones included. Beside the kinds of single
            tensors there is "channel": filters of all layers that write the same channels, as those of a residual
            stream do, are one group, with one norm and one decision. Without it few channels of a stream can ever be
            removed, since all of its writers must be off at once.
        linear: the group kind of linear weights (the projections of attention layers count as linear).
        exclude: what is to be trained but not penalised: names ("fc", "features.0.weight"), parameters or modules. The
            output layer is a usual candidate when whole neurons are selected.
        example_inputs: for `conv="channel"`, what the network is called with: a tensor, a tuple or a dict of arguments.

    Returns:
        Groups with `params`, `param_names` order and `group`: one for each kind, and a last one, `group=None`, for
        biases, normalisation and everything else.
    """
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in names.values()):
        raise ValueError("model has lazy layers without shapes yet: run one batch through it first")
    left_out = excluded(model, exclude)
    kinds: dict[int, str | Partition | None] = {}
    joint = conv == "channel"
    for module in model.modules():
        for p, group in _weights(module, "filter" if joint else conv, linear):
            if id(p) not in left_out:
                kinds.setdefault(id(p), group)
    groups: dict[Any, dict[str, Any]] = {}
    if joint:
        weights = {id(m.weight) for m in model.modules() if isinstance(m, (*_CONVS, *_TRANSPOSED))}
        groups["channel"] = _channel_group(
            model, example_inputs, {name: p for name, p in names.items() if id(p) in weights - left_out}, kinds
        )
        names = {name: p for name, p in names.items() if id(p) not in weights - left_out}
    for name, p in names.items():
        group = kinds.get(id(p))
        try:
            partition(group, p.shape)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        entry = groups.setdefault(group, {"params": [], "group": group})
        entry["params"].append((name, p))
    unpenalised = groups.pop(None, None)
    return list(groups.values()) + ([unpenalised] if unpenalised else [])


def _channel_group(
    model: nn.Module, example_inputs: Any, params: dict[str, nn.Parameter], kinds: dict[int, Any]
) -> dict[str, Any]:
    """The param group of these convolution weights, their filters joined where they write the same channels."""
    if example_inputs is None:
        raise ValueError("conv='channel' follows the channels through the network: give example_inputs to call it with")
    # Which channels are the same is known to surgery, which builds on this module: hence not before it is asked for.
    from dessilbi.surgery.channels import channel_partitions

    filters = {name: partition(kinds[id(p)], p.shape) for name, p in params.items()}
    joined = channel_partitions(model, example_inputs, {n: part for n, part in filters.items() if part is not None})
    return {"params": list(params.items()), "group": [joined[name] for name in params]}


def _weights(
    module: nn.Module, conv: str | Partition | None, linear: str | Partition | None
) -> Iterable[tuple[Tensor, str | Partition | None]]:
    """The weights of a module that can be penalised, with their group."""
    if isinstance(module, _TRANSPOSED):
        if conv == "filter":
            conv = transposed_filters(module.groups)
        elif conv == "input":
            conv = Slices((0,), kind="input")
        yield module.weight, conv
    elif isinstance(module, _CONVS):
        if conv == "input" and module.groups > 1:
            conv = Slices((0, 2), fold=module.groups, kind="input")
        yield module.weight, conv
    elif isinstance(module, nn.Linear):
        yield module.weight, linear
    elif isinstance(module, nn.MultiheadAttention):
        for p in (module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight):
            if p is not None:
                yield p, linear


def excluded(model: nn.Module, exclude: Iterable[str | Tensor | nn.Module]) -> set[int]:
    if isinstance(exclude, (str, Tensor, nn.Module)):
        exclude = (exclude,)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    left_out: set[int] = set()
    for item in exclude:
        if isinstance(item, str):
            if item not in modules and item not in parameters:
                raise ValueError(f"exclude names {item!r}, which is neither a module nor a parameter of the model")
            item = parameters[item] if item in parameters else modules[item]
        left_out.update([id(item)] if isinstance(item, Tensor) else map(id, item.parameters()))
    return left_out
