"""The iteration on a GPU in one pass over memory: Triton kernels that take many tensors in one launch.

A launch reads its tensors through a table of addresses; a program of it works on one tile of one tensor. Where every
element is a group, the step moves seven words a parameter (W, G, u, V in; W, u, V out), two more than SGD with
momentum. Filters and rows are read once as well: a program holds whole groups, takes their norms and goes on. Magnitude
scaling needs ρ, a count over the whole tensor, before anything moves: that is one more pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dessilbi.groups import Elements, Slices
from dessilbi.kernels.bucket import Bucket

# Columns of the table: addresses of W, G, u, V, ε, of the norms and the counts of the scaling pass, rows, columns.
_WIDTH = 9

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class _Tile:
    """The shape of a program's work: rows × columns, and whether longer rows are worked off in several chunks."""

    rows: int
    cols: int
    chunked: bool
    warps: int


_SMALL = 1 << 25

_ELEMENTS = _Tile(1, 2048, False, 4)
_ROW_TILES = (_Tile(32, 32, False, 4), _Tile(8, 256, False, 4), _Tile(1, 2048, True, 8))


@triton.jit
def _pointer(entry, column: tl.constexpr, kind: tl.constexpr):
    return tl.multiple_of(tl.load(entry + column).to(tl.pointer_type(kind)), 16)


@triton.jit
def _number(x, position, kind: tl.constexpr):
    """A hyperparameter: a number (0), a tensor of one (1) or of one entry a parameter (2)."""
    if kind == 0:
        number = x
    elif kind == 1:
        number = tl.load(x).to(tl.float32)
    else:
        number = tl.load(x + position).to(tl.float32)
    return number


@triton.jit
def _move(
    entry, offsets, mask, v, shrunk_scale, rise, lr, lam, kappa, rate, momentum, undamped, decay,
    W_TYPE: tl.constexpr, ELEMENTS: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    DECAY: tl.constexpr, DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, SCALING: tl.constexpr,
):  # fmt: skip
    """One step of a tile. For groups `shrunk_scale` and `rise` are κ·ε·max(0, 1 − λ/‖V_g‖) and β, one a row; for
    elements `rise` is max(1 − ρ, beta_min)."""
    w_ptr = _pointer(entry, 0, W_TYPE) + offsets
    w = tl.load(w_ptr, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(_pointer(entry, 1, W_TYPE) + offsets, mask=mask, other=0.0).to(tl.float32)
    if MAXIMIZE:
        g = -g
    if ELEMENTS:
        size = tl.abs(v)
        gamma = kappa * tl.where(v < 0, -1.0, 1.0) * tl.maximum(size - lam, 0.0)
        if SCALING:
            scale_ptr = _pointer(entry, 4, tl.float32) + offsets
            gamma *= tl.load(scale_ptr, mask=mask, other=0.0)
            norm = tl.abs(w)
            tl.store(scale_ptr, norm, mask=mask)
            rise = rise / tl.maximum(norm, 1.0)
    else:
        gamma = shrunk_scale * v
    d = (w - gamma) * rate
    if SCALING:
        v += lr * rise * d
    else:
        v += lr * d
    tl.store(_pointer(entry, 3, tl.float32) + offsets, v, mask=mask)
    g += d
    if DECAY and not DECOUPLED:
        g += decay * w
    if MOMENTUM:
        u_ptr = _pointer(entry, 2, tl.float32) + offsets
        u = momentum * tl.load(u_ptr, mask=mask, other=0.0) + undamped * g
        tl.store(u_ptr, u, mask=mask)
        if NESTEROV:
            g += momentum * u
        else:
            g = u
    if DECAY and DECOUPLED:
        w -= decay * w
    tl.store(w_ptr, (w - kappa * lr * g).to(W_TYPE), mask=mask)


@triton.jit
def _room(counts, beta_min):
    """max(1 − ρ, beta_min) from the two counts of a tensor: groups of Γ, groups of W that are not zero."""
    active = tl.load(counts).to(tl.float32)
    alive = tl.load(counts + 1).to(tl.float32)
    return tl.maximum(1.0 - active / tl.maximum(alive, 1.0), beta_min)


@triton.jit
def _step_elements(
    table, tiles, lr_, lam_, kappa, rate, momentum, undamped, decay, beta_min,
    WIDTH: tl.constexpr, W_TYPE: tl.constexpr, LR: tl.constexpr, LAM: tl.constexpr, MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, DECAY: tl.constexpr, DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr,
    SCALING: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    position = tl.load(tiles + 2 * pid)
    entry = table + position * WIDTH
    lr, lam = _number(lr_, position, LR), _number(lam_, position, LAM)
    offsets = tl.load(tiles + 2 * pid + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(entry + 8)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    mask = offsets < size
    v = tl.load(_pointer(entry, 3, tl.float32) + offsets, mask=mask, other=0.0)
    room = 1.0
    if SCALING:
        room = _room(_pointer(entry, 6, tl.int32), beta_min)
    _move(
        entry, offsets, mask, v, 0.0, room, lr, lam, kappa, rate, momentum, undamped, decay,
        W_TYPE, True, MOMENTUM, NESTEROV, DECAY, DECOUPLED, MAXIMIZE, SCALING,
    )  # fmt: skip


@triton.jit
def _count_elements(
    table, tiles, lam_, WIDTH: tl.constexpr, W_TYPE: tl.constexpr, LAM: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    position = tl.load(tiles + 2 * pid)
    entry = table + position * WIDTH
    lam = _number(lam_, position, LAM)
    offsets = tl.load(tiles + 2 * pid + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = tl.load(entry + 8)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    mask = offsets < size
    v = tl.load(_pointer(entry, 3, tl.float32) + offsets, mask=mask, other=0.0)
    scale = tl.load(_pointer(entry, 4, tl.float32) + offsets, mask=mask, other=0.0)
    w = tl.load(_pointer(entry, 0, W_TYPE) + offsets, mask=mask, other=0.0).to(tl.float32)
    counts = _pointer(entry, 6, tl.int32)
    tl.atomic_add(counts, tl.sum(((tl.abs(v) > lam) & (scale > 0)).to(tl.int32)))
    tl.atomic_add(counts + 1, tl.sum((w != 0).to(tl.int32)))


@triton.jit
def _row_norms(pointer, row, cols, inside, ROWS: tl.constexpr, COLS: tl.constexpr):
    squares = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for start in range(0, cols, COLS):
        column = start + tl.arange(0, COLS)
        mask = inside[:, None] & (column < cols)[None, :]
        x = tl.load(pointer + row[:, None] * cols + column[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += x * x
    return tl.sqrt(tl.sum(squares, axis=1))


@triton.jit
def _shrink(norm, lam):
    return tl.maximum(norm - lam, 0.0) / tl.maximum(norm, 1.1754943508222875e-38)


@triton.jit
def _rows(
    entry, first, rows, cols, lr, lam, kappa, rate, momentum, undamped, decay, beta_min,
    W_TYPE: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, SCALING: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, CHUNKED: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    """One step of some whole rows."""
    if NORMALISED:
        lam = lam * tl.sqrt(cols.to(tl.float32))
    row = first.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    v_ptr = _pointer(entry, 3, tl.float32)
    rise = tl.full([ROWS], 1.0, tl.float32)
    if SCALING:
        norms = _pointer(entry, 5, tl.float32)
        norm = tl.load(norms + row, mask=inside, other=0.0)
        own = tl.load(norms + rows + row, mask=inside, other=0.0)
        scale_ptr = _pointer(entry, 4, tl.float32) + row
        factor = kappa * _shrink(norm, lam) * tl.load(scale_ptr, mask=inside, other=0.0)
        rise = _room(_pointer(entry, 6, tl.int32), beta_min) / tl.maximum(own, 1.0)
        tl.store(scale_ptr, own, mask=inside)
    elif CHUNKED:
        factor = kappa * _shrink(_row_norms(v_ptr, row, cols, inside, ROWS, COLS), lam)
    if CHUNKED:
        for start in range(0, cols, COLS):
            column = start + tl.arange(0, COLS)
            mask = inside[:, None] & (column < cols)[None, :]
            offsets = row[:, None] * cols + column[None, :]
            v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
            _move(
                entry, offsets, mask, v, factor[:, None], rise[:, None], lr, lam, kappa, rate, momentum, undamped,
                decay, W_TYPE, False, MOMENTUM, NESTEROV, DECAY, DECOUPLED, MAXIMIZE, SCALING,
            )  # fmt: skip
    else:
        column = tl.arange(0, COLS)
        mask = inside[:, None] & (column < cols)[None, :]
        offsets = row[:, None] * cols + column[None, :]
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        if not SCALING:
            factor = kappa * _shrink(tl.sqrt(tl.sum(v * v, axis=1)), lam)
        _move(
            entry, offsets, mask, v, factor[:, None], rise[:, None], lr, lam, kappa, rate, momentum, undamped,
            decay, W_TYPE, False, MOMENTUM, NESTEROV, DECAY, DECOUPLED, MAXIMIZE, SCALING,
        )  # fmt: skip


@triton.jit
def _step_rows(
    table, tiles, lr_, lam_, kappa, rate, momentum, undamped, decay, beta_min,
    WIDTH: tl.constexpr, W_TYPE: tl.constexpr, LR: tl.constexpr, LAM: tl.constexpr, MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, DECAY: tl.constexpr, DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr,
    SCALING: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, CHUNKED: tl.constexpr,
    ALIGNED: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    position, first = tl.load(tiles + 2 * pid), tl.load(tiles + 2 * pid + 1)
    entry = table + position * WIDTH
    lr, lam = _number(lr_, position, LR), _number(lam_, position, LAM)
    rows, cols = tl.load(entry + 7), tl.load(entry + 8)
    # Rows of a multiple of 16 elements are loaded 16 bytes at a time. A launch of both kinds looks at run time.
    if ALIGNED == 1:
        _rows(
            entry, first, rows, tl.multiple_of(cols, 16), lr, lam, kappa, rate, momentum, undamped, decay, beta_min,
            W_TYPE, MOMENTUM, NESTEROV, DECAY, DECOUPLED, MAXIMIZE, SCALING, ROWS, COLS, CHUNKED, NORMALISED,
        )  # fmt: skip
    elif cols % 16 == 0:
        _rows(
            entry, first, rows, cols // 16 * 16, lr, lam, kappa, rate, momentum, undamped, decay, beta_min,
            W_TYPE, MOMENTUM, NESTEROV, DECAY, DECOUPLED, MAXIMIZE, SCALING, ROWS, COLS, CHUNKED, NORMALISED,
        )  # fmt: skip
    else:
        _rows(
            entry, first, rows, cols, lr, lam, kappa, rate, momentum, undamped, decay, beta_min,
            W_TYPE, MOMENTUM, NESTEROV, DECAY, DECOUPLED, MAXIMIZE, SCALING, ROWS, COLS, CHUNKED, NORMALISED,
        )  # fmt: skip


@triton.jit
def _count_rows(
    table, tiles, lam_, WIDTH: tl.constexpr, W_TYPE: tl.constexpr, LAM: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    position = tl.load(tiles + 2 * pid)
    entry = table + position * WIDTH
    lam = _number(lam_, position, LAM)
    rows, cols = tl.load(entry + 7), tl.load(entry + 8)
    if NORMALISED:
        lam = lam * tl.sqrt(cols.to(tl.float32))
    row = tl.load(tiles + 2 * pid + 1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    v_ptr, w_ptr = _pointer(entry, 3, tl.float32), _pointer(entry, 0, W_TYPE)
    if cols % 16 == 0:
        norm = _row_norms(v_ptr, row, cols // 16 * 16, inside, ROWS, COLS)
        own = _row_norms(w_ptr, row, cols // 16 * 16, inside, ROWS, COLS)
    else:
        norm = _row_norms(v_ptr, row, cols, inside, ROWS, COLS)
        own = _row_norms(w_ptr, row, cols, inside, ROWS, COLS)
    norms = _pointer(entry, 5, tl.float32)
    tl.store(norms + row, norm, mask=inside)
    tl.store(norms + rows + row, own, mask=inside)
    scale = tl.load(_pointer(entry, 4, tl.float32) + row, mask=inside, other=0.0)
    counts = _pointer(entry, 6, tl.int32)
    tl.atomic_add(counts, tl.sum(((norm > lam) & (scale > 0)).to(tl.int32)))
    tl.atomic_add(counts + 1, tl.sum((own > 0).to(tl.int32)))


def why_not(bucket: Bucket) -> str | None:
    """What keeps these kernels from moving this bucket; None if nothing does."""
    first = bucket.params[0]
    if first.device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"it runs on CUDA devices, not on {first.device.type}"
    if first.dtype not in _TYPES:
        return f"it has no {first.dtype}"
    for part, p in zip(bucket.partitions, bucket.params, strict=True):
        if not isinstance(part, Elements) and not (isinstance(part, Slices) and part.axes == (0,) and part.fold == 1):
            return f"it takes weights, filters and neurons, not group={part.kind!r}"
        if not _dense(p) or p.data_ptr() % 16:
            return f"a parameter of shape {tuple(p.shape)} and strides {p.stride()} is a view it cannot address"
    return None


def _dense(p: Tensor) -> bool:
    """Whether the tensor fills its memory without gaps, the first dimension outermost."""
    return (
        p.is_contiguous()
        or (p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last))
        or (p.ndim == 5 and p.is_contiguous(memory_format=torch.channels_last_3d))
    )


def sgd_step(bucket: Bucket) -> None:
    """One step of DessiLBI."""
    device = bucket.params[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on the current one
            _sgd_step(bucket, device)
    else:
        _sgd_step(bucket, device)


def _sgd_step(bucket: Bucket, device: torch.device) -> None:
    options = bucket.options
    # By what a plan is made from, not by the tensors: shards are new objects at every step, and ids come again.
    key = (
        id(options), tuple(bucket.index), bool(bucket.scales), options["size_normalised"],
        isinstance(bucket.partitions[0], Elements), device, tuple(p.shape for p in bucket.params),
    )  # fmt: skip
    plan = bucket.cache.get(key)
    if plan is None:
        plan = bucket.cache[key] = _Plan(bucket)
    bucket.grads = [
        g if g.stride() == stride and g.dtype == dtype and not g.data_ptr() % 16 else torch.empty_like(p).copy_(g)
        for g, p, (stride, dtype) in zip(bucket.grads, bucket.params, plan.layouts, strict=True)
    ]
    table = plan.table(bucket)
    lr, lr_kind = _as_argument([options["lr"]], device)
    lam, lam_kind = _as_argument(bucket.lams, device)
    kind = _TYPES[bucket.params[0].dtype]
    scaling = bool(bucket.scales)
    if scaling:
        for launch in plan.launches:
            launch.count(table, lam, (_WIDTH, kind, lam_kind))
    momentum, decay = options["momentum"], options["weight_decay"]
    numbers = (
        lr, lam, options["kappa"], 1 / options["nu"], momentum,
        1.0 if bucket.first else 1.0 - options["dampening"], decay, options["beta_min"],
    )  # fmt: skip
    flags = (
        _WIDTH, kind, lr_kind, lam_kind, momentum != 0, options["nesterov"], decay != 0,
        options["decoupled_weight_decay"], options["maximize"], scaling,
    )  # fmt: skip
    for launch in plan.launches:
        launch.step(table, numbers, flags)


def _as_argument(values: list[Any], device: torch.device) -> tuple[Any, int]:
    """A hyperparameter as a kernel takes it, and its kind: a number (0), a tensor of one (1), one an entry (2)."""
    first = values[0]
    if not isinstance(first, Tensor):
        return float(first), 0
    if all(v is first for v in values):
        return first.to(device), 1
    return torch.stack(values).to(device), 2


class _Launch:
    """The tensors of a bucket that share a tile shape."""

    def __init__(
        self, tile: _Tile, work: list[tuple[int, int]], aligned: bool, normalised: bool, device: torch.device
    ) -> None:
        self.grid = (len(work), 1, 1)
        self.warps = tile.warps
        self.tiles = torch.tensor(work, dtype=torch.int32).to(device)
        self.of_step: tuple[Any, ...]
        self.of_count: tuple[Any, ...]
        if tile is _ELEMENTS:
            self.stepper, self.counter = _step_elements, _count_elements
            self.of_step = self.of_count = (tile.cols, aligned)
        else:
            self.stepper, self.counter = _step_rows, _count_rows
            self.of_step = (tile.rows, tile.cols, tile.chunked, int(aligned), normalised)
            self.of_count = (tile.rows, tile.cols, normalised)
        self.compiled: dict[Any, Any] = {}

    def step(self, table: Tensor, numbers: tuple[Any, ...], flags: tuple[Any, ...]) -> None:
        self._run(self.stepper, (table, self.tiles, *numbers, *flags, *self.of_step), flags)

    def count(self, table: Tensor, lam: Any, flags: tuple[Any, ...]) -> None:
        self._run(self.counter, (table, self.tiles, lam, *flags, *self.of_count), flags)

    def _run(self, kernel: Any, arguments: tuple[Any, ...], flags: tuple[Any, ...]) -> None:
        # Binding two dozen arguments costs Triton's launcher more time than the GPU needs for a small network: what
        # it compiled for these flags is called directly. Types follow from the flags, and addresses are aligned.
        key = (flags, *[a.dtype for a in arguments[2:4] if isinstance(a, Tensor)])
        run = self.compiled.get(key)
        if run is not None:
            run(*arguments)
        else:
            compiled = kernel[self.grid](*arguments, num_warps=self.warps)
            self.compiled[key] = compiled and compiled[self.grid]


def _by_tile(extents: list[tuple[int, int]], elements: bool) -> dict[tuple[_Tile, bool], list[int]]:
    """Which tensors go together: by the tile that suits them, and by whether all they have is 16 bytes at a time."""
    members: dict[tuple[_Tile, bool], list[int]] = {}
    for i, (rows, cols) in enumerate(extents):
        if rows * cols:
            tile = _ELEMENTS if elements else next(t for t in _ROW_TILES if t.chunked or cols <= t.cols)
            members.setdefault((tile, cols % 16 == 0), []).append(i)
    long = [key for key in members if key[0].chunked]
    if elements or not long:
        return members
    # A launch costs as much as the work on some ten million parameters, and more than a few wasted lanes: in small
    # networks, short and odd rows go with the long ones while they are few.
    sizes = {key: sum(math.prod(extents[i]) for i in group) for key, group in members.items()}
    few = [key for key in members if key != (_ROW_TILES[-1], True) and 16 * sizes[key] < sum(sizes.values()) < _SMALL]
    together = [i for key in (*long, *few) for i in members.pop(key, [])] if few else []
    if together:
        members[_ROW_TILES[-1], all(extents[i][1] % 16 == 0 for i in together)] = sorted(together)
    return members


class _Plan:
    """What does not change from step to step: the tiles, the scratch of the scaling pass, and where the table lies."""

    def __init__(self, bucket: Bucket) -> None:
        device = bucket.params[0].device
        elements = isinstance(bucket.partitions[0], Elements)
        extents = [(1, p.numel()) if elements else (len(p), p.numel() // max(1, len(p))) for p in bucket.params]
        self.extents = torch.tensor(extents, dtype=torch.int64)
        self.layouts: list[tuple[tuple[int, ...], torch.dtype]] = [(p.stride(), p.dtype) for p in bucket.params]
        work: dict[tuple[_Tile, bool], list[tuple[int, int]]] = {}
        for (tile, aligned), members in _by_tile(extents, elements).items():
            for i in members:
                rows, cols = extents[i]
                count = math.ceil(cols / tile.cols) if elements else math.ceil(rows / tile.rows)
                work.setdefault((tile, aligned), []).extend((i, k) for k in range(count))
        normalised = bucket.options["size_normalised"]
        self.launches = [_Launch(tile, items, aligned, normalised, device) for (tile, aligned), items in work.items()]
        # Each tensor's scratch begins on 16 bytes: four counts, of which two are used, and two norms a row.
        self.counts = torch.zeros(len(bucket.params), 4, dtype=torch.int32, device=device) if bucket.scales else None
        self.norms = (
            [torch.empty(2 * rows, device=device) for rows, _ in extents] if bucket.scales and not elements else None
        )
        none = [0] * len(bucket.params)
        self.scratch = [
            *([n.data_ptr() for n in self.norms] if self.norms is not None else none),
            *([c.data_ptr() for c in self.counts] if self.counts is not None else none),
        ]
        self._rows: list[int] = []
        self._table: Tensor | None = None
        self._spare: Tensor | None = None
        self._held: list[tuple[Tensor, Tensor]] = []

    def table(self, bucket: Bucket) -> Tensor:
        """The table of addresses on the device, sent anew only when an address changed."""
        if self.counts is not None:
            self.counts.zero_()
        rows = self._addresses(bucket)
        device = bucket.params[0].device
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if rows == self._rows and self._table is not None and not capturing:
            return self._table
        self._relayout(bucket)
        rows = self._addresses(bucket)
        if any(address % 16 for address in rows):
            raise RuntimeError("a parameter or its state was replaced by a view at an odd address: use foreach=True")
        columns = torch.tensor(rows, dtype=torch.int64).view(_WIDTH - 2, -1)
        host = torch.cat([columns.T, self.extents], dim=1)
        if device.type != "cuda":
            self._rows, self._table = rows, host
            return host
        if capturing:
            return self._captured(host, device)
        # Pinned memory must not be written again while a copy from it may be under way: each upload takes its own.
        self._rows, self._table = rows, host.pin_memory().to(device, non_blocking=True)
        if self._spare is None:
            self._spare = torch.empty_like(host, pin_memory=True)
        return self._table

    def _relayout(self, bucket: Bucket) -> None:
        """Bring state into the memory layout of its parameter, where the user changed that (channels_last, say)."""
        for i, (p, state) in enumerate(zip(bucket.params, bucket.states, strict=True)):
            for name in ("dual", "momentum_buffer", "scale"):
                x = state.get(name)
                if x is not None and x.shape == p.shape and x.stride() != p.stride():
                    state[name] = torch.empty_like(p, dtype=x.dtype).copy_(x)
            if bucket.grads[i].stride() != p.stride():
                bucket.grads[i] = torch.empty_like(p).copy_(bucket.grads[i])
        self.layouts = [(p.stride(), p.dtype) for p in bucket.params]
        bucket.duals = [s["dual"] for s in bucket.states]
        if bucket.scales:
            bucket.scales = [s["scale"] for s in bucket.states]

    def _captured(self, host: Tensor, device: torch.device) -> Tensor:
        """A table of the graph's own: later eager steps must not overwrite what its replays read."""
        if self._spare is None:
            raise RuntimeError("take one step outside the CUDA graph before capturing one")
        pinned, self._spare, self._rows = self._spare, None, []
        pinned.copy_(host)
        table = pinned.to(device, non_blocking=True)
        self._held.append((pinned, table))
        return table

    def _addresses(self, bucket: Bucket) -> list[int]:
        """All addresses, column by column of the table."""
        none = [0] * len(bucket.params)
        return [
            *[p.data_ptr() for p in bucket.params],
            *[g.data_ptr() for g in bucket.grads],
            *([s["momentum_buffer"].data_ptr() for s in bucket.states] if bucket.options["momentum"] else none),
            *[v.data_ptr() for v in bucket.duals],
            *([e.data_ptr() for e in bucket.scales] or none),
            *self.scratch,
        ]
