"""One training step: eager, compiled, or captured in a CUDA graph. Nothing in a step waits for the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from dessilbi.training.config import Config
from dessilbi.training.datasets import Feed

Ticket = tuple[Tensor, ...]

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Eager steps before the capture: allocations, the optimizer's state and autotuning must be done by then.
_WARMUP = 3


def autocast(config: Config, device: torch.device) -> AbstractContextManager[object]:
    """The precision of the forward pass."""
    if config.precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, DTYPES[config.precision])


class Step:
    """Load a ticket, forward, backward, clip, update: returns the loss, on the device.

    The loss is the mean over the whole batch; in one of several processes, this process's share of it.
    """

    def __init__(
        self, config: Config, model: nn.Module, optimizer: Optimizer, feed: Feed, device: torch.device, world: int = 1
    ) -> None:
        self.config, self.model, self.optimizer, self.feed = config, model, optimizer, feed
        self.device, self.world = device, world
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")

    def __call__(self, ticket: Ticket, size: int) -> Tensor:
        """One step on a batch of `size` images over all processes together."""
        self.optimizer.zero_grad(set_to_none=True)
        images, labels = self.feed.load(ticket)
        with autocast(self.config, self.device):
            loss = self._loss(self.model(images), labels, size)
        # DDP averages over the processes what should be added up.
        self.scaler.scale(loss * self.world if self.world > 1 else loss).backward()  # type: ignore[no-untyped-call]
        if self.config.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.params, self.config.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def _loss(self, outputs: Tensor, labels: Tensor, size: int) -> Tensor:
        smoothing = self.config.label_smoothing
        if self.world == 1:
            return functional.cross_entropy(outputs, labels, label_smoothing=smoothing)
        return functional.cross_entropy(outputs, labels, label_smoothing=smoothing, reduction="sum") / size


class GraphStep(Step):
    """A step as one CUDA graph: the host launches it, and nothing else.

    The first steps run eagerly, on a stream of their own; then a step is captured, which computes nothing, and from
    there on replayed with each ticket copied into the captured one's place. A batch of another size, the last of an
    epoch, runs eagerly. lr and λ are tensors that the graph reads, changed in place between replays.
    """

    def __init__(
        self, config: Config, model: nn.Module, optimizer: Optimizer, feed: Feed, device: torch.device, world: int = 1
    ) -> None:
        super().__init__(config, model, optimizer, feed, device, world)
        self.size = feed.order.batch_size
        self.seen = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.held: Ticket = ()
        self.loss: Tensor | None = None
        self._stream = torch.cuda.Stream(device)

    def __call__(self, ticket: Ticket, size: int) -> Tensor:
        if size != self.size:
            return super().__call__(ticket, size)
        if self.graph is None and self.seen < _WARMUP:
            self.seen += 1
            return self._on_the_side(lambda: Step.__call__(self, ticket, size))
        if self.graph is None:
            self._capture(ticket)
        for old, new in zip(self.held, ticket, strict=True):
            old.copy_(new, non_blocking=True)
        assert self.graph is not None
        assert self.loss is not None
        self.graph.replay()
        return self.loss

    def _on_the_side(self, work: Callable[[], Tensor]) -> Tensor:
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        return result

    def _capture(self, ticket: Ticket) -> None:
        copies = [part.clone() for part in ticket]
        self.held = type(ticket)(*copies) if hasattr(ticket, "_fields") else tuple(copies)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        # torch warns of optimizers that were not made for capture; those have been refused when they were built.
        with warnings.catch_warnings(), torch.cuda.graph(graph, stream=self._stream):
            warnings.simplefilter("ignore", UserWarning)
            self.loss = super().__call__(self.held, self.size)
        self.graph = graph


def build(
    config: Config, model: nn.Module, optimizer: Optimizer, feed: Feed, device: torch.device, world: int = 1
) -> Step:
    """The step that the configuration asks for; `model` is wrapped for distribution already."""
    if config.compile == "graph":
        if device.type != "cuda":
            raise ValueError(
                f"compile='graph' needs a CUDA device, not {device.type}: take compile='compile' or 'none'"
            )
        return GraphStep(config, model, optimizer, feed, device, world)
    if config.compile == "compile":
        model = cast(nn.Module, torch.compile(model))
    return Step(config, model, optimizer, feed, device, world)
