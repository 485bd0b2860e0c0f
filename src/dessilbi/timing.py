"""Times side by side: what else the machine does in the meantime falls on all contenders alike. Imports no torch."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_WARM_CALLS, _WARM_SECONDS = 3, 0.1
_SLOT_SECONDS = 0.02


class Speed(NamedTuple):
    """A contender beside the reference of the same rounds. Seconds a call; `ratio` is how many times as fast."""

    seconds: float
    seconds_quartiles: tuple[float, float]
    ratio: float
    ratio_quartiles: tuple[float, float]


def interleave(
    work: Mapping[str, Callable[[], Any]], rounds: int = 30, *, device: str = "cpu", seed: int = 0
) -> dict[str, list[float]]:
    """Seconds a call of each contender, one figure a round.

    All are warmed up first. A round times every one of them, in an order drawn anew; short work is called as often as
    20 ms take, after one call that brings it back into the caches. `device` is where the work goes on: a GPU is timed
    by its own events.
    """
    if rounds < 1:
        raise ValueError(f"rounds = {rounds}: give at least 1")
    timed = _on_gpu if device.startswith("cuda") else _on_cpu
    repeats = {name: _warm_up(call, timed) for name, call in work.items()}
    samples: dict[str, list[float]] = {name: [] for name in work}
    order, shuffle = list(work), random.Random(seed).shuffle
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            shuffle(order)
            for name in order:
                if repeats[name] > 1:
                    work[name]()
                samples[name].append(timed(work[name], repeats[name]))
    finally:
        if collecting:
            gc.enable()
    return samples


def compare(samples: Mapping[str, Sequence[float]], reference: str) -> dict[str, Speed]:
    """Medians and quartiles over the rounds; a ratio is taken within its round, where both saw the same machine."""
    found = {}
    for name, seconds in samples.items():
        ratios = [base / own for base, own in zip(samples[reference], seconds, strict=True)]
        found[name] = Speed(
            statistics.median(seconds), _quartiles(seconds), statistics.median(ratios), _quartiles(ratios)
        )
    return found


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _warm_up(call: Callable[[], Any], timed: Callable[[Callable[[], Any], int], float]) -> int:
    """Calls the work until it runs at its speed; how often to call it in a slot."""
    fastest, start, calls = math.inf, time.perf_counter(), 0
    while calls < _WARM_CALLS or time.perf_counter() - start < _WARM_SECONDS:
        seconds = timed(call, 1)
        calls += 1
        if calls > 1:
            fastest = min(fastest, seconds)
    return max(1, math.ceil(_SLOT_SECONDS / max(fastest, 1e-7)))


def _on_cpu(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _on_gpu(call: Callable[[], Any], repeats: int) -> float:
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats
