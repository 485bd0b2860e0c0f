"""``Config``: everything that decides what a run computes, as plain values. Imports no torch."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from dessilbi.training.growing import Growing


@dataclass(frozen=True)
class Config:
    """A training run. Every field has a default; unknown or impossible values raise a ValueError that says what to do.

    Args:
        model: a network of :func:`dessilbi.models.names`, or your own as ``package.module:factory``.
        model_options: further arguments of the network, such as ``{"widths": [4, 8, 60, 42]}``.
        start: a file by :func:`dessilbi.save_shrunk`, in the run folder or elsewhere: the network, made from `model`,
            and the weights to start from. The run folder keeps a copy.
        mask: a file of a :class:`~dessilbi.Selection`, likewise: what it leaves out is zero from the first step to the
            last.
        ticket: a file of a :class:`~dessilbi.Ticket`, likewise: weights to start from and what stays zero. On another
            data set than the ticket's, the output layer starts anew.
        data: a data set of :func:`dessilbi.data.names`, or ``imagenet`` (folders ``train`` and ``val``).
            Parts of one are ``cifar10[0-4]`` (these classes) and ``mnist[:5000]`` (the first images of training).
        input_shape: channels, height and width that images are brought to: padded with zeros, gray ones repeated,
            coloured ones made gray; for a network that was made for other data. For ``imagenet`` the squares that are
            cut out, ``(3, 224, 224)`` if left out.
        data_root: the folder of the data sets.
        crop: random crops with 4 pixels of padding, for the sets in colour; the digit-like sets (mnist, fashion-mnist,
            digits) are never cropped, as in the paper. For ``imagenet``, random resized crops *and* mirroring.
        flip: mirror half of the images, where a mirrored image is one that could be in the set: cifar10, cifar100,
            fashion-mnist. Ignored for digits.
        epochs, batch: how long, and how many images a step, over all processes together.
        optimizer: ``dessilbi``, ``dessiadamw``, any class of torch.optim, in any case, or one of the optimizers of
            :mod:`dessilbi.baselines`: ``adabound``, ``linbreg``, ``adabreg``.
        optimizer_options: further arguments of the optimizer, such as ``{"betas": [0.9, 0.95]}``.
        method, method_options: what accompanies the optimizer: one of the baselines that act during training, and its
            arguments, such as ``{"keep": 0.1}``: ``gradual`` (magnitude pruning on the cubic schedule),
            ``soft-filters``, ``l1``, ``slimming``: see :mod:`dessilbi.baselines`. They act on what `conv`, `linear` and
            `exclude` name.
        grow_options: settings of a network that grows, which `dessilbi grow` trains: see
            :class:`dessilbi.training.growing.Growing`. `epochs` is then the most that the run may take; what becomes of
            the schedule, see :mod:`dessilbi.applications.grow`.
        lr, kappa, nu, lam, momentum, nesterov, weight_decay, decoupled_weight_decay, scaling, beta_min, fused: as in
            :class:`~dessilbi.DessiLBI`. Optimizers of torch get those of them that they know.
        conv, linear, exclude: what is sparse, as in :func:`dessilbi.param_groups`; ``none`` for not penalised.
        keep, ramp: let :class:`~dessilbi.TargetThreshold` set λ so that this fraction of the groups is kept in the end;
            `lam` then plays no part.
        sparse_start: the fraction that a network trained by ``linbreg`` or ``adabreg`` starts with, of what `conv`,
            `linear` and `exclude` name (see :func:`dessilbi.baselines.sparse_start`); 1 for all of it. What `start`,
            `mask` or `ticket` give is left as it is.
        schedule: ``step`` divides lr by `lr_drop` every `lr_every` epochs, or after those of `lr_at`; ``cosine`` takes
            it to zero at the end of the run; ``constant`` leaves it. The first two are those of the paper and the usual
            one.
        warmup: epochs over which lr rises to its value, in equal steps.
        precision: of the forward and backward pass; weights and the optimizer's state stay float32. ``fp16`` needs a
            loss scale, for which each step waits for the device: take ``bf16`` where there is a choice.
        channels_last: memory format of images and convolutions, usually faster, on CPUs too.
        compile: ``compile`` is torch.compile of the network, ``graph`` a CUDA graph of the whole step: several times
            faster for the small networks of CIFAR, whose step is otherwise bound by launches.
        clip: largest norm of the whole gradient.
        label_smoothing: as in :func:`torch.nn.functional.cross_entropy`.
        seed: of the initialisation, the order and the augmentation.
        device: ``auto`` is a GPU if there is one; ``cpu``, ``cuda``, ``cuda:1``.
        eval_batch: images at a time when evaluating.
        workers: processes that decode images, for ``imagenet`` only.
        fsdp: under torchrun, shard parameters and state (FSDP2) instead of copying them (DDP).
        checkpoint_every: steps between checkpoints; by default one at the end of every epoch.
        keep_checkpoints: how many of them stay.
        keep_epochs: epochs at whose ends a checkpoint stays beside those, for pruning that starts from them and tickets
            that rewind to them; 0 is the initial state.
        patience: stop after so many epochs without a better test accuracy. (It is then no longer a *test* accuracy.)
        settle_keep, settle: stop at the end of the epoch at which the selection of this fraction has settled: the last
            three epochs changed it by less than `settle` each (Jaccard distance, see :class:`dessilbi.Settling`).
        settle_allocation: how much of that selection each layer gets: what the ticket will have, see
            :func:`dessilbi.baselines.allocate`. With "none" the order of entry decides, which never changes for those
            that are in: such a selection counts as settled as soon as any can.
        tensorboard: write the metrics for TensorBoard too.
        watch_step_size: every so many steps, compare lr with the curvature of the loss, and say so if it is too large
            (see :class:`dessilbi.diagnostics.StepSizeMonitor`); every 100 steps costs 4 to 8 % of the time.
    """

    model: str = "lenet5"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    start: str | None = None
    mask: str | None = None
    ticket: str | None = None
    data: str = "mnist"
    input_shape: tuple[int, ...] | None = None
    data_root: str = "data"
    crop: bool = True
    flip: bool = True

    epochs: int = 5
    batch: int = 128
    optimizer: str = "dessilbi"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    method: Literal["none", "gradual", "soft-filters", "l1", "slimming"] = "none"
    method_options: Mapping[str, Any] = field(default_factory=dict)
    grow_options: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    decoupled_weight_decay: bool = False
    schedule: Literal["step", "cosine", "constant"] = "step"
    lr_drop: float = 10.0
    lr_every: int = 30
    lr_at: tuple[int, ...] = ()
    warmup: float = 0
    clip: float | None = None
    label_smoothing: float = 0.0
    patience: int | None = None
    settle_keep: float | None = None
    settle: float = 0.1
    settle_allocation: Literal["none", "global", "uniform", "erk", "lamp"] = "none"
    seed: int = 0

    kappa: float = 1.0
    nu: float = 100.0
    lam: float = 1.0
    scaling: bool = False
    beta_min: float = 1e-2
    conv: Literal["weight", "filter", "channel", "input", "layer", "none"] = "filter"
    linear: Literal["weight", "neuron", "input", "layer", "none"] = "weight"
    exclude: tuple[str, ...] = ()
    keep: float | None = None
    ramp: float = 0.3
    sparse_start: float = 0.01

    device: str = "auto"
    precision: Literal["float32", "bf16", "fp16"] = "float32"
    channels_last: bool = False
    compile: Literal["none", "compile", "graph"] = "none"
    fused: bool | None = None
    fsdp: bool = False
    eval_batch: int = 1000
    workers: int = 4

    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    keep_epochs: tuple[int, ...] = ()
    tensorboard: bool = False
    watch_step_size: int | None = None

    def __post_init__(self) -> None:
        for name, kind in _HINTS.items():
            object.__setattr__(self, name, _typed(name, getattr(self, name), kind))
        for name, (valid, need) in _RULES.items():
            value = getattr(self, name)
            if value is not None and not valid(value):
                raise ValueError(f"{name}={value!r}: must be {need}")
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov=True needs a momentum: set momentum to 0.9, say, or nesterov=False")
        if self.precision == "fp16" and self.compile == "graph":
            raise ValueError("precision='fp16' cannot be captured in a CUDA graph (its loss scale is decided on the "
                             "host): take precision='bf16', or compile='none'")  # fmt: skip
        for name in ("mask", "ticket"):
            if self.fsdp and getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)!r} with fsdp=True: sharded parameters are not kept at "
                                 "zero; set fsdp=False")  # fmt: skip
        if self.watch_step_size is not None and (self.fsdp or self.optimizer not in ("dessilbi", "sgd")):
            what = "fsdp=True" if self.fsdp else f"optimizer={self.optimizer!r}"
            raise ValueError(f"watch_step_size={self.watch_step_size!r} with {what}: it knows steps along the gradient "
                             "of whole parameters; leave it out, or take optimizer='dessilbi' or 'sgd'")  # fmt: skip
        if self.fsdp and self.method != "none":
            raise ValueError(f"method={self.method!r} with fsdp=True: it works on whole tensors; set fsdp=False")
        if self.fsdp and self.bregman:
            raise ValueError(f"optimizer={self.optimizer!r} with fsdp=True: it works on whole tensors; set fsdp=False")
        if self.mask is not None and self.ticket is not None:
            raise ValueError(f"mask={self.mask!r} and ticket={self.ticket!r}: a ticket has its mask; give one of them")
        if self.grow_options:
            self._check_growing()
        if self.method == "none" and self.method_options:
            raise ValueError(f"method_options={dict(self.method_options)!r} with method='none': name the method")
        if self.settle_keep is not None and not self.ours:
            raise ValueError(f"settle_keep={self.settle_keep!r} needs a path, which optimizer={self.optimizer!r} does "
                             "not leave: take optimizer='dessilbi' or 'dessiadamw'")  # fmt: skip
        if self.ours and self.keep is not None and self.conv == "none" and self.linear == "none":
            raise ValueError(f"keep={self.keep!r} with conv='none' and linear='none': nothing is penalised; "
                             "choose what is to be sparse, such as conv='filter'")  # fmt: skip
        if not self.ours and self.keep is not None:
            raise ValueError(f"keep={self.keep!r} needs optimizer='dessilbi' or 'dessiadamw', not {self.optimizer!r}")

    def _check_growing(self) -> None:
        Growing.of(self.grow_options)
        if not self.ours:
            raise ValueError(f"grow_options with optimizer={self.optimizer!r}, which selects nothing: take "
                             "'dessilbi' or 'dessiadamw'")  # fmt: skip
        if self.keep is not None:
            raise ValueError(f"grow_options with keep={self.keep!r}: a target would fix how much is selected; give lam")
        for name in ("mask", "ticket", "settle_keep", "patience", "watch_step_size"):
            if getattr(self, name) is not None:
                raise ValueError(f"grow_options with {name}={getattr(self, name)!r}: leave one of them out")
        if self.fsdp or self.method != "none":
            raise ValueError("grow_options with fsdp or a method: leave one of them out")

    @property
    def ours(self) -> bool:
        """Whether the optimizer leaves a path."""
        return self.optimizer in ("dessilbi", "dessiadamw")

    @property
    def bregman(self) -> bool:
        """Whether the weights themselves are sparse while they are trained."""
        return self.optimizer in ("linbreg", "adabreg")

    @property
    def starts_sparse(self) -> bool:
        """Whether most initial weights are set to zero: where they are to be sparse and nobody has given them."""
        return self.bregman and self.start is None and self.mask is None and self.ticket is None

    def replace(self, **changes: Any) -> Config:
        """A copy with other values."""
        _check_names(changes)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: numbers, strings, lists, dicts and None."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """The configuration of `to_dict`, or of a part of it."""
        _check_names(values)
        return cls(**values)

    def to_toml(self) -> str:
        """All of it as TOML. What is not set (None, which TOML has not) stands there as a comment."""
        lines = ["# A training run of dessilbi. Repeat it with: dessilbi train --config THIS_FILE", ""]
        for name, value in self.to_dict().items():
            lines.append(f"# {name} is not set" if value is None else f"{name} = {_toml(value)}")
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, path: str | PathLike[str]) -> Config:
        """Read a TOML file of some or all fields."""
        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such configuration file")
        try:
            return cls.from_dict(tomllib.loads(file.read_text(encoding="utf-8")))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file}: not a TOML file ({error})") from None
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None


def differences(a: Config, b: Config) -> list[str]:
    """What differs, a line a field: ``lr: 0.1 -> 0.05``."""
    one, other = a.to_dict(), b.to_dict()
    return [f"{name}: {one[name]!r} -> {other[name]!r}" for name in one if not _same(one[name], other[name])]


def _same(x: Any, y: Any) -> bool:
    return bool(x == y) or (isinstance(x, float) and isinstance(y, float) and math.isnan(x) and math.isnan(y))


def _check_names(values: Mapping[str, Any]) -> None:
    known = [f.name for f in fields(Config)]
    for name in values:
        if name not in known:
            from difflib import get_close_matches

            near = get_close_matches(str(name), known, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"unknown setting {name!r}: {advice}")


_HINTS = get_type_hints(Config)

_Rule = tuple[Callable[[Any], bool], str]


def _at_least(low: float) -> _Rule:
    return lambda x: low <= x < math.inf, f"a number of at least {low}"


def _above(low: float) -> _Rule:
    return lambda x: low < x < math.inf, f"a finite number above {low}"


_POSITIVE: _Rule = (lambda x: x >= 1, "a whole number of at least 1")
_NAME: _Rule = (lambda x: bool(x.strip()), "a name, not empty")

_RULES: dict[str, _Rule] = {
    "model": _NAME,
    "start": _NAME,
    "mask": _NAME,
    "ticket": _NAME,
    "input_shape": (lambda x: len(x) == 3 and min(x) >= 1, "channels, height and width, such as [3, 32, 32]"),
    "data": _NAME,
    "optimizer": _NAME,
    "device": _NAME,
    "epochs": _POSITIVE,
    "batch": _POSITIVE,
    "eval_batch": _POSITIVE,
    "lr_every": _POSITIVE,
    "lr_at": (lambda x: all(epoch >= 1 for epoch in x), "epochs counted from 1"),
    "checkpoint_every": _POSITIVE,
    "keep_checkpoints": _POSITIVE,
    "keep_epochs": (lambda x: all(epoch >= 0 for epoch in x), "epochs counted from 1, or 0 for the initial state"),
    "patience": _POSITIVE,
    "watch_step_size": _POSITIVE,
    "settle_keep": (lambda x: 0 < x < 1, "a fraction in (0, 1), such as 0.06"),
    "settle": (lambda x: 0 < x <= 1, "a Jaccard distance in (0, 1]"),
    "lr": _at_least(0),
    "lr_drop": _above(0),
    "warmup": _at_least(0),
    "workers": _at_least(0),
    "seed": (lambda x: 0 <= x < 2**63, "a whole number from 0 to 2^63 - 1"),
    "momentum": (lambda x: 0 <= x < 1, "a number in [0, 1)"),
    "weight_decay": _at_least(0),
    "kappa": _above(0),
    "nu": (lambda x: x > 0, "a number above 0 (inf switches the coupling off)"),
    "lam": (lambda x: x >= 0, "a number of at least 0"),
    "beta_min": (lambda x: 0 < x <= 1, "a number in (0, 1]"),
    "keep": (lambda x: 0 < x <= 1, "a fraction in (0, 1], such as 0.06; leave it out for a constant lam"),
    "ramp": (lambda x: 0 <= x <= 1, "a fraction in [0, 1]"),
    "sparse_start": (lambda x: 0 < x <= 1, "a fraction in (0, 1], such as 0.01; 1 for a dense start"),
    "clip": _above(0),
    "label_smoothing": (lambda x: 0 <= x < 1, "a number in [0, 1)"),
}


_LISTS = {tuple[str, ...]: "a list of names", tuple[int, ...]: "a list of whole numbers"}


def _typed(name: str, value: Any, kind: Any) -> Any:
    """`value` as a field of that kind has it, or an error that says what it should be."""
    choices = get_args(kind)
    if choices and all(isinstance(c, str) for c in choices):  # a Literal
        value = "none" if value is None and "none" in choices else value
        if value not in choices:
            raise ValueError(f"{name}={value!r}: must be one of {', '.join(choices)}")
        return value
    if choices and type(None) in choices:
        return None if value is None else _typed(name, value, choices[0])
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, (str, Path)):
        return str(value).lower() if name in ("optimizer", "data") else str(value)
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if kind in _LISTS and isinstance(value, (list, tuple)) and all(type(v) is choices[0] for v in value):
        return tuple(value)
    if name.endswith("_options") and isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: _plain(name, v) for k, v in value.items()}
    need = {bool: "true or false", str: "a string", int: "a whole number", float: "a number"}.get(
        kind, _LISTS.get(kind, "a table of names and values")
    )
    raise ValueError(f"{name}={value!r}: must be {need}, not {type(value).__name__}")


def _plain(name: str, value: Any) -> Any:
    """An option that a TOML file can hold, and that compares equal after being read back."""
    if isinstance(value, (list, tuple)):
        return [_plain(name, v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _plain(name, v) for k, v in value.items()}
    if isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{name}: {value!r} cannot be written to a file: give numbers, strings, lists or tables of them")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return repr(value)  # inf and nan are TOML's words too
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)} = {_toml(v)}" for k, v in value.items()) + "}"
    return str(value)
