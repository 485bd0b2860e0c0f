"""The options of `train`, made from the fields of `Config`: its types, its defaults, one option a field.

A new field is an option at once. Its line below says under which heading it stands and what it is; a field without one
comes last, without words.
"""

from __future__ import annotations

import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click
from click.core import ParameterSource

from dessilbi.training import presets
from dessilbi.training.config import Config

SECTIONS: dict[str, dict[str, str]] = {
    "Network and data": {
        "model": "One of `dessilbi models`, or your own: package.module:factory.",
        "model_options": "Argument of the network, such as widths=[4,8]; repeatable.",
        "start": "Network and weights to start from: a file by save_shrunk.",
        "mask": "What stays zero: a file of a Selection.",
        "ticket": "Weights to start from and what stays zero: a file of a Ticket.",
        "data": "One of `dessilbi data`, or imagenet; cifar10[0-4] are classes of it.",
        "input_shape": "Channels, height, width that images are brought to.",
        "data_root": "Folder of the data sets.",
        "crop": "Random crops, but of digits.",
        "flip": "Mirror half of the images, but of digits.",
        "workers": "Processes that decode images, for imagenet.",
    },
    "Training": {
        "epochs": "Passes over the data.",
        "batch": "Images a step, over all processes together.",
        "eval_batch": "Images at a time when evaluating.",
        "optimizer": "dessilbi, dessiadamw, or any class of torch.optim.",
        "optimizer_options": "Further argument of the optimizer; repeatable.",
        "method": "What accompanies the optimizer: a baseline that acts during training.",
        "method_options": "Its argument, such as keep=0.1; repeatable.",
        "grow_options": "Setting of a network that grows (see dessilbi grow); repeatable.",
        "lr": "Step size α.",
        "momentum": "Momentum τ.",
        "nesterov": "Nesterov's form of momentum.",
        "weight_decay": "Weight decay.",
        "decoupled_weight_decay": "Decay the weights themselves, not through the gradient.",
        "schedule": "How the step size falls: in steps, to zero, not at all.",
        "lr_drop": "What --schedule step divides the step size by.",
        "lr_every": "Epochs between the drops.",
        "lr_at": "Epoch after which it drops, instead; repeatable.",
        "warmup": "Epochs of linear warm-up.",
        "clip": "Largest norm of the gradient.",
        "label_smoothing": "Label smoothing.",
        "patience": "Stop after so many epochs without a better test accuracy.",
        "settle_keep": "Stop once the selection of this fraction has settled.",
        "settle": "Jaccard distance between epochs that counts as settled.",
        "settle_allocation": "How much of that selection each layer gets.",
        "seed": "Of the initialisation, the order and the augmentation.",
    },
    "Structure": {
        "conv": "What is sparse in convolutions.",
        "linear": "What is sparse in linear layers.",
        "exclude": "Module or parameter that is not penalised; repeatable.",
        "kappa": "Damping κ: the larger, the closer to the exact path.",
        "nu": "Coupling ν of weights W and structure Γ.",
        "lam": "Threshold λ. With --keep it follows the target instead.",
        "keep": "Fraction of groups to keep in the end, such as 0.06.",
        "ramp": "Part of the run over which the support grows to --keep.",
        "sparse_start": "Fraction of the weights that linbreg and adabreg start with.",
        "scaling": "Magnitude scaling: compare layers on one scale.",
        "beta_min": "Smallest factor of the magnitude scaling.",
    },
    "Speed": {
        "device": "cpu, cuda, cuda:1, or auto.",
        "precision": "Arithmetic of the network.",
        "channels_last": "Channels-last memory, faster convolutions on GPUs.",
        "compile": "torch.compile, or a CUDA graph of the whole step.",
        "fused": "One kernel for the whole update.",
        "fsdp": "Under torchrun: shard the parameters (FSDP2) instead of DDP.",
    },
    "Run folder": {
        "checkpoint_every": "Steps between checkpoints; none: one at the end of each epoch.",
        "keep_checkpoints": "How many checkpoints stay.",
        "keep_epochs": "Epoch at whose end a checkpoint stays, to prune from; repeatable.",
        "tensorboard": "Write TensorBoard files into the run folder.",
        "watch_step_size": "Steps between two looks at whether the step size is within Theorem 1's bound.",
    },
}
_OTHER = "Other"
_HELP = {name: text for section in SECTIONS.values() for name, text in section.items()}
_SECTION = {name: title for title, section in SECTIONS.items() for name in section}
_ORDER = list(_HELP)

_F = TypeVar("_F", bound=Callable[..., Any])


class ConfigOption(click.Option):
    """An option that belongs to a field of `Config`, under a heading."""

    section: str
    field: str


class Sectioned(click.Command):
    """A command whose `--help` shows the options of `Config` under their headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx)
            if record:
                title = option.section if isinstance(option, ConfigOption) else "This command"
                sections.setdefault(title, []).append(record)
        for title in ("This command", *SECTIONS, _OTHER):
            if title in sections:
                with formatter.section(title):
                    formatter.write_dl(sections[title], col_max=38)


class _OrNone(click.ParamType):  # type: ignore[type-arg]
    """A value, or the word `none`."""

    def __init__(self, inner: click.ParamType[Any]) -> None:
        self.inner = inner
        self.name = inner.name

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        return f"{self.inner.name.upper()}|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return None if value == "none" else self.inner.convert(value, param, ctx)


class _Pair(click.ParamType):  # type: ignore[type-arg]
    """KEY=VALUE; the value as TOML has it, and a bare word is a string."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        key, equals, text = str(value).partition("=")
        if not (key and equals):
            self.fail(f"{value!r} is not KEY=VALUE", param, ctx)
        try:
            return key, tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            return key, text


def config_options(function: _F) -> _F:
    """Add an option for each field of `Config`."""
    return _add_options(function)


def search_options(function: _F) -> _F:
    """The same for a command that is about more than this run: what its own options are called is `--search-…` here,
    and what it decides by itself is no option."""
    decided = ("start", "mask", "ticket", "method", "method_options", "settle_keep", "settle_allocation",
               "seed", "patience", "keep_epochs")  # fmt: skip
    return _add_options(function, "search-", ("epochs", "keep"), decided)


def growth_options(function: _F) -> _F:
    """The same for a network that grows: without what cannot go with that, and its settings under names of their own
    (:class:`~dessilbi.training.growing.Growing`)."""
    unfit = ("grow_options", "mask", "ticket", "method", "method_options", "keep", "ramp", "settle_keep", "settle",
             "settle_allocation", "patience", "fsdp", "watch_step_size", "sparse_start")  # fmt: skip
    return _add_options(function, without=unfit)


def _add_options(function: _F, prefix: str = "", prefixed: Sequence[str] = (), without: Sequence[str] = ()) -> _F:
    hints = get_type_hints(Config)
    defaults = Config()
    names = sorted(
        (field.name for field in fields(Config) if field.name not in without),
        key=lambda name: _ORDER.index(name) if name in _ORDER else 10**6,
    )
    for name in reversed(names):
        own = prefix if name in prefixed else ""
        function = _option(name, hints[name], getattr(defaults, name), own)(function)
    return function


def _option(name: str, hint: Any, default: Any, prefix: str) -> Callable[[_F], _F]:
    flag = "--" + prefix + name.replace("_", "-")
    inner, optional = _without_none(hint)
    settings: dict[str, Any] = {"default": None, "help": f"{_HELP.get(name, '')}  [{_shown(default)}]".strip()}
    if inner is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    elif _is_mapping(inner):
        settings |= {"type": _Pair(), "multiple": True}
    elif get_origin(inner) in (tuple, list):
        settings |= {"type": get_args(inner)[0], "multiple": True}
    else:
        kind = click.types.convert_type(inner) if not _choices(inner) else click.Choice(_choices(inner))
        settings["type"] = _OrNone(kind) if optional else kind
    decorate = click.option(flag, prefix.replace("-", "_") + name, cls=ConfigOption, **settings)

    def add(function: _F) -> _F:
        decorated = decorate(function)
        option = decorated.__click_params__[-1]  # type: ignore[attr-defined]
        option.section, option.field = _SECTION.get(name, _OTHER), name
        return decorated

    return add


def _without_none(hint: Any) -> tuple[Any, bool]:
    """`X | None` as (X, True); of several kinds, the first that a word on the command line can be."""
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return kinds[0], len(kinds) < len(get_args(hint))
    return hint, False


def _choices(hint: Any) -> list[str]:
    return [str(value) for value in get_args(hint)] if get_origin(hint) is Literal else []


def _is_mapping(hint: Any) -> bool:
    kind = get_origin(hint) or hint
    return isinstance(kind, type) and issubclass(kind, Mapping)


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    if default is None or default == () or default == {} or default == []:
        return "none"
    return f"{default:g}" if isinstance(default, float) else str(default)


def given(ctx: click.Context) -> dict[str, Any]:
    """The fields of `Config` that were given on the command line, and only those."""
    options = {o.name: o.field for o in ctx.command.params if isinstance(o, ConfigOption) and o.name}
    values = {
        field: ctx.params[name]
        for name, field in options.items()
        if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    hints = get_type_hints(Config)
    return {n: dict(v) if _is_mapping(_without_none(hints[n])[0]) else v for n, v in values.items()}


def configuration(base: Config | None, preset: str | None, file: Path | None, changes: Mapping[str, Any]) -> Config:
    """Defaults, then the preset (or `base`), then the file, then `changes`: what comes later wins."""
    config = presets.get(preset) if preset else base or Config()
    read = {}
    if file:
        values = Config.from_toml(file).to_dict()
        read = {name: values[name] for name in tomllib.loads(file.read_text(encoding="utf-8"))}
    # In one step: what the file sets may only make sense with what the command line says.
    return Config.from_dict({**config.to_dict(), **read, **changes})
