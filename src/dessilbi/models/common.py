"""What every network of this folder does with its arguments and its initial weights."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import nn

__all__ = ["check_size", "check_widths", "he_init", "residual_widths"]


def check_size(argument: str, value: int) -> int:
    """`value` as an int of at least 1; `argument` is what an error calls it."""
    try:
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"{argument} = {value!r}: give a whole number") from None
    if size < 1:
        raise ValueError(f"{argument} = {size}: give a whole number of at least 1")
    return size


def check_widths(widths: Sequence[int], layers: Sequence[str]) -> tuple[int, ...]:
    """`widths` as a tuple of one positive int for each of the `layers`."""
    if len(widths) != len(layers):
        raise ValueError(f"widths = {list(widths)} has {len(widths)} entries; give {len(layers)}: {', '.join(layers)}")
    return tuple(check_size(f"widths[{i}] ({layers[i]})", width) for i, width in enumerate(widths))


def residual_widths(
    widths: Sequence[int], streams: Sequence[str], inner: Sequence[tuple[str, int]], expansion: int = 1
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The stream widths and the inner widths of a residual network, from its `widths` argument.

    `inner` names the inner layers of the blocks, in the order of the forward pass, each with the index of its
    stream. `widths` lists the streams and then those layers; or the streams alone, and then an inner layer is
    its stream's width divided by `expansion`.
    """
    if len(widths) == len(streams):
        wide = check_widths(widths, streams)
        return wide, tuple(max(1, wide[stream] // expansion) for _, stream in inner)
    layers = [name for name, _ in inner]
    if len(widths) != len(streams) + len(layers):
        raise ValueError(
            f"widths = {list(widths)} has {len(widths)} entries; give {len(streams)}, the streams"
            f" {', '.join(streams)}; or {len(streams) + len(layers)}, those and then {', '.join(layers)}"
        )
    checked = check_widths(widths, [*streams, *layers])
    return checked[: len(streams)], checked[len(streams) :]


def he_init(network: nn.Module) -> None:
    """He initialisation in place (He et al., Delving deep into rectifiers, ICCV 2015).

    Convolutions: normal, variance 2/fan_out, which keeps the size of the gradients. Linear layers: normal,
    variance 2/fan_in, because fan_out of the last one is the number of classes, which says nothing about its
    input. Biases: zero. Batch normalisation stays as torch makes it, scale one and shift zero.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
