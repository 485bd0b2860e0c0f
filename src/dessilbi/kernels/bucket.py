"""What a kernel is given: the tensors of one param group that take the same step, as parallel lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dessilbi.groups import Number, Partition


@dataclass(slots=True)
class Bucket:
    """Parameters of one device, dtype and phase (first step or not), with their gradients and state.

    `options` is the optimizer's param group, `index` the parameters' places in it. Where the coupling is on,
    `partitions`, `duals` (V), `lams` (λ) and, under magnitude scaling, `scales` (ε) run parallel to `params`; where it
    is off they are empty. `kernel` is what moves the bucket; `cache` is the optimizer's: what a kernel keeps there
    lasts until the state is replaced. Where groups span tensors, `joint` has all these tensors, moved by this bucket or
    not; `factors` are what was read of all tensors of a bucket, by place, before any of them moved in this step.
    """

    options: dict[str, Any]
    first: bool
    index: list[int] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    partitions: list[Partition] = field(default_factory=list)
    duals: list[Tensor] = field(default_factory=list)
    lams: list[Number] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    joint: Bucket | None = None
    factors: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    cache: dict[Any, Any] = field(default_factory=dict)
    kernel: Callable[[Bucket], None] | None = None

    def state(self, name: str) -> list[Tensor]:
        return [s[name] for s in self.states]
