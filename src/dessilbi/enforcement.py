"""Masks that stay in force: what they take out is zero again after every step of any optimizer."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class MaskHandle:
    """Keeps what a selection took out at zero until `remove()`, or the end of its `with`."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        # As wide as the parameter and laid out like it, which is what makes the multiplication one launch.
        self._masks = {id(p): torch.empty_like(p, requires_grad=False).copy_(mask) for p, mask in pairs}
        self._alive = {id(p): weakref.ref(p, partial(self._forget, id(p))) for p, _ in pairs}
        self._own: weakref.WeakKeyDictionary[Optimizer, _Own] = weakref.WeakKeyDictionary()
        self._hook = register_optimizer_step_post_hook(self._after_step)
        _HANDLES.add(self)

    def mask(self, p: Tensor) -> Tensor | None:
        """What of a parameter is kept, if it is one of those."""
        alive = self._alive.get(id(p))
        return self._masks[id(p)] != 0 if alive is not None and alive() is p else None

    @torch.no_grad()
    def change(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Other masks for parameters that have one, in place: a CUDA graph of a step holds on to the old ones."""
        for p, mask in pairs:
            if self.mask(p) is None:
                raise ValueError(f"a parameter of shape {tuple(p.shape)} has no mask here to be changed")
            self._masks[id(p)].copy_(mask)
            p.masked_fill_(~mask, 0)

    def remove(self) -> None:
        """End it; the weights stay as they are and may move again."""
        self._hook.remove()
        self._masks.clear()
        self._alive.clear()
        self._own.clear()

    def __enter__(self) -> MaskHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        own = self._own.get(optimizer)
        if own is None or own.is_stale(optimizer):
            own = self._own[optimizer] = _Own(optimizer, self._alive, self._masks)
        for params, masks in own.batches:
            torch._foreach_mul_(params, masks)

    def _forget(self, key: int, _: object) -> None:
        self._masks.pop(key, None)
        self._alive.pop(key, None)
        if not self._alive:
            self.remove()


_HANDLES: weakref.WeakSet[MaskHandle] = weakref.WeakSet()


def in_force(p: Tensor) -> Tensor | None:
    """What the selections that are applied to a parameter keep of it, together; None where there is none."""
    masks = [mask for handle in _HANDLES if (mask := handle.mask(p)) is not None]
    return torch.stack(masks).all(0) if masks else None


class _Own:
    """What of a selection one optimizer moves, as lists of one device and dtype."""

    def __init__(self, optimizer: Optimizer, alive: dict[int, weakref.ref[Tensor]], masks: dict[int, Tensor]) -> None:
        self.count = _count(optimizer)
        sorted_by: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        every: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        for p in every:
            if id(p) in alive and alive[id(p)]() is p:
                mask = masks[id(p)] = masks[id(p)].to(p)  # the model may have been moved since
                params, theirs = sorted_by.setdefault((p.device, p.dtype), ([], []))
                params.append(p)
                theirs.append(mask)
        self.batches = list(sorted_by.values())

    def is_stale(self, optimizer: Optimizer) -> bool:
        return self.count != _count(optimizer) or any(
            params[0].device != masks[0].device or params[0].dtype != masks[0].dtype for params, masks in self.batches
        )


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
