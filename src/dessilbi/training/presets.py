"""The settings of the paper, by name; each is a complete :class:`Config`. Imports no torch.

A preset is one training run. What a row of the paper does afterwards (fine-tuning, retraining a ticket) starts from the
folder that the run leaves. Those of growing networks are for `dessilbi grow`.

Where the paper leaves a setting open, or its value belongs to the authors' script (their λ for magnitude scaling, see
`SPEC.md`), the structure follows a target instead: `keep` is what the row of the paper kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dessilbi.training.config import Config


class _Preset(NamedTuple):
    description: str
    settings: dict[str, Any]


def names() -> list[str]:
    """The names that `get` knows, in the order of the paper."""
    return list(_PRESETS)


def get(name: str) -> Config:
    """The configuration of a preset; change it with ``get(name).replace(epochs=10)``."""
    return Config(**_find(name).settings)


def describe(name: str) -> str:
    """One line on a preset: what it trains, and what the paper reports for it."""
    return _find(name).description


def _find(name: str) -> _Preset:
    if name in _PRESETS:
        return _PRESETS[name]
    from difflib import get_close_matches

    near = get_close_matches(name.lower(), _PRESETS, n=1, cutoff=0.5)
    raise ValueError(f"unknown preset {name!r}: " + (f"did you mean {near[0]!r}?" if near else "see names()"))


# -- training (SPEC section 4): the same seven rows for every network --------------------------------------------

_MOMENTUM = {"momentum": 0.9}
_DECAY = {"momentum": 0.9, "weight_decay": 1e-4}
_PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"optimizer": "sgd", **_PLAIN}),
    "sgd-mom": ("SGD with momentum", {"optimizer": "sgd", **_PLAIN, **_MOMENTUM}),
    "sgd-mom-wd": ("SGD with momentum and weight decay", {"optimizer": "sgd", **_DECAY}),
    "adam": ("Adam", {"optimizer": "adam", **_PLAIN, "lr": 1e-3}),
    "dessilbi-naive": ("DessiLBI", {**_PLAIN}),
    "dessilbi-mom": ("DessiLBI with momentum", {**_PLAIN, **_MOMENTUM}),
    "dessilbi-mom-wd": ("DessiLBI with momentum and weight decay", {**_DECAY}),
}
_STEPS = {"epochs": 100, "batch": 128, "lr": 0.1, "schedule": "step", "lr_drop": 10.0, "lr_every": 30}
_GPU = {"precision": "bf16", "channels_last": True, "compile": "none"}
_IMAGENET = {"data": "imagenet", "nu": 1000.0, "workers": 12, "eval_batch": 250, **_GPU}
# name in the preset -> words, settings, and the paper's accuracies of the seven rows in %
_NETWORKS: dict[str, tuple[str, dict[str, Any], tuple[float | None, ...]]] = {
    "lenet-mnist": (
        "LeNet-5 on MNIST",
        {"model": "lenet5", "data": "mnist", "nu": 10.0},
        (98.87, 99.16, 99.23, 99.19, 99.02, 99.19, 99.20),
    ),
    "resnet20-cifar10": (
        "ResNet-20 on CIFAR-10",
        {"model": "resnet20", "data": "cifar10", "nu": 10.0},
        (86.46, 89.44, 90.31, 89.14, 89.26, 89.72, 89.95),
    ),
    "resnet18-imagenet": (
        "ResNet-18 on ImageNet",
        {"model": "resnet18", **_IMAGENET},
        (None, None, 69.76, 59.66, 65.26, 68.55, 70.55),
    ),
    "alexnet-imagenet": (
        "AlexNet on ImageNet",
        {"model": "alexnet", **_IMAGENET, "lr": 0.01},
        (None, None, 56.55, None, None, None, 57.09),
    ),
}


def _training() -> dict[str, _Preset]:
    found = {}
    for network, (words, settings, accuracies) in _NETWORKS.items():
        for (row, (optimizer, options)), accuracy in zip(_ROWS.items(), accuracies, strict=True):
            paper = "" if accuracy is None else f" (paper: {accuracy:.2f} %)"
            found[f"paper/{network}-{row}"] = _Preset(f"{words}: {optimizer}{paper}", {**_STEPS, **settings, **options})
    return found


# -- structure: CIFAR-10, batch 128 ------------------------------------------------------------------------------

_CIFAR10 = {"data": "cifar10", "batch": 128, **_DECAY}
_PRUNING = {
    **_CIFAR10,
    "epochs": 200,
    "lr": 0.1,
    "schedule": "step",
    "lr_drop": 5.0,
    "lr_every": 60,
    "weight_decay": 5e-4,
    "scaling": True,
    "keep_epochs": (60, 120, 200),
}
_WEIGHTS = {**_PRUNING, "conv": "weight", "linear": "weight", "nu": 500.0}
_FILTERS = {**_PRUNING, "conv": "filter", "linear": "none", "nu": 500.0, "keep": 0.5}
_LAYERS = {**_PRUNING, "conv": "layer", "linear": "none"}
_TICKETS = {
    **_CIFAR10,
    "epochs": 160,
    "lr": 0.1,
    "schedule": "constant",
    "conv": "weight",
    "linear": "weight",
}

# Not of the paper: a first run, and the number that this project holds itself to on a CPU.
# The warm-up keeps the momentum of the first steps from switching units off for good.
_QUICK = {
    "epochs": 5,
    "channels_last": True,
    "schedule": "cosine",
    "lr": 0.05,
    "warmup": 0.5,
    "keep": 0.3,
    **_PLAIN,
    **_MOMENTUM,
}

# -- growing: filters only, as in the paper; its sizes are budgets, so that accuracies compare at equal sizes ---------

_GROWING = {
    **_DECAY,
    "batch": 128,
    "epochs": 400,
    "lr": 0.01,
    "schedule": "step",
    "lr_drop": 10.0,
    "nu": 100.0,
    "lam": 0.3,
    "conv": "filter",
    "linear": "none",
}
_GROWTH = {"every": 10, "tau": 0.8, "by": 0.3, "least": 2, "then": 30}
_SEEDS: dict[str, dict[str, Any]] = {
    "vgg16": {"widths": [8] * 13 + [512]},
    "resnet56": {"widths": [8, 8, 8]},
    "vgg19": {"widths": [1, 1, 2, 2, *[4] * 4, *[8] * 8, 512]},
}
# Words, and the sizes in parameters; where the paper has none, those of CIFAR-10.
_SIXFOLD = [110_000, 200_000, 400_000, 820_000, 1_410_000, 2_000_000]
_GROWN: dict[tuple[str, str], tuple[str, Any]] = {
    ("vgg16", "cifar10"): ("VGG16 from 8 filters a layer (paper: 93.80 % with 2.96 M parameters)", 2_960_000),
    ("resnet56", "cifar10"): ("ResNet-56 from 8 channels (paper: 94.82 % with 2.69 M parameters)", 2_690_000),
    ("vgg19", "cifar10"): (
        "VGG19, six growths (paper: from 88.54 % with 0.11 M parameters to 94.03 % with 2.00 M)",
        _SIXFOLD,
    ),
    ("vgg16", "cifar100"): ("VGG16 on CIFAR-100 from 8 filters a layer", 2_960_000),
    ("resnet56", "cifar100"): (
        "ResNet-56 on CIFAR-100 from 8 channels (paper: 76.86 % with 3.37 M parameters)",
        3_370_000,
    ),
    ("vgg19", "cifar100"): ("VGG19 on CIFAR-100, six growths", _SIXFOLD),
}
# Not of the paper: a large step size, every size trained to the end of a cosine, and a GPU kept busy.
_FAST = {
    "lr": 0.1,
    "warmup": 1.0,
    "weight_decay": 5e-4,
    "schedule": "cosine",
    "nu": 1000.0,
    "lam": 0.05,
    "precision": "bf16",
    "channels_last": True,
    "compile": "graph",
}
_FASTER: dict[str, dict[str, Any]] = {
    "vgg16": {"every": 8, "by": 0.5, "then": 80},
    "resnet56": {"every": 8, "by": 0.5, "then": 80},
    "vgg19": {"every": 40, "then": 100},
}


def _growing() -> dict[str, _Preset]:
    found = {}
    for (network, data), (words, sizes) in _GROWN.items():
        settings = {**_GROWING, "model": network, "model_options": _SEEDS[network], "data": data}
        growth = {"params": sizes, **_GROWTH}
        found[f"grow/{network}-{data}"] = _Preset(words, {**settings, "grow_options": growth})
        if data == "cifar10":
            quick = {**settings, **_FAST, "grow_options": {**growth, **_FASTER[network]}}
            found[f"grow/{network}-{data}-fast"] = _Preset(f"{words}, in minutes on a GPU", quick)
    return found


_PRESETS: dict[str, _Preset] = {
    "quick/lenet-mnist": _Preset(
        "LeNet-5 on MNIST, DessiLBI with momentum, 30 % kept: 99.2 % in five epochs, half a minute on two CPU cores",
        {"model": "lenet5", "data": "mnist", **_QUICK, "nu": 1000.0},
    ),
    "quick/lenet-digits": _Preset(
        "LeNet-5 on scikit-learn's digits: a first run of seconds that needs no files",
        {"model": "lenet5", "data": "digits", **_QUICK, "epochs": 10, "batch": 64},
    ),
    "quick/lenet-mnist-ticket": _Preset(
        "LeNet-5 on MNIST, the search for a winning ticket among single weights: `dessilbi ticket sweep --preset …`",
        {"model": "lenet5", "data": "mnist", **_QUICK, "nu": 100.0, "conv": "weight", "linear": "weight"},
    ),
    **_training(),
    "paper/vgg16-weights": _Preset(
        "VGG16, weight pruning: train for a mask of 5-6 % of the weights (paper: fine-tuned 94.18 %, dense 93.45 %)",
        {**_WEIGHTS, "model": "vgg16", "keep": 0.06},
    ),
    "paper/resnet50-weights": _Preset(
        "ResNet-50 (CIFAR), weight pruning: a mask of 9-11 % (paper: fine-tuned 92.64 %, dense 94.13 %)",
        {**_WEIGHTS, "model": "resnet50", "keep": 0.10},
    ),
    "paper/vgg16-filters": _Preset(
        "VGG16, filter pruning (paper: fine-tuned 93.59 % at 29-32 % of the MACs, dense 93.43 %)",
        {**_FILTERS, "model": "vgg16"},
    ),
    "paper/resnet56-filters": _Preset(
        "ResNet-56, filter pruning (paper: fine-tuned 93.94 % at 61-62 % of the MACs, dense 93.46 %)",
        {**_FILTERS, "model": "resnet56"},
    ),
    "paper/vgg16-layers": _Preset(
        "VGG16, layer pruning: 7 of 13 convolutions stay (paper: 94.06 %, 6 dropped, 33.8 % of the MACs)",
        {**_LAYERS, "model": "vgg16", "nu": 1200.0, "keep": 7 / 13},
    ),
    "paper/resnet56-layers": _Preset(
        "ResNet-56, layer pruning: 53 of 55 convolutions stay (paper: 93.47 %, 2 dropped, 44.9 % of the MACs)",
        {**_LAYERS, "model": "resnet56", "nu": 1500.0, "keep": 53 / 55},
    ),
    "paper/vgg16-ticket": _Preset(
        "VGG16, the search for a winning ticket: the mask is read at an early epoch, ν=200, λ=0.03",
        {**_TICKETS, "model": "vgg16", "nu": 200.0, "lam": 0.03},
    ),
    "paper/resnet50-ticket": _Preset(
        "ResNet-50 (CIFAR), the search for a winning ticket: the mask is read at an early epoch, ν=500, λ=0.05",
        {**_TICKETS, "model": "resnet50", "nu": 500.0, "lam": 0.05},
    ),
    "grow/lenet-mnist": _Preset(
        "LeNet-5 on MNIST from 2 filters a layer: minutes on two CPU cores",
        {
            "model": "lenet5",
            "model_options": {"widths": [2, 2, 2, 2]},
            "data": "mnist",
            "channels_last": True,
            "epochs": 40,
            "lr": 0.03,
            "schedule": "cosine",
            "nu": 100.0,
            "lam": 0.1,
            "linear": "neuron",
            "exclude": ("classifier.2",),
            **_MOMENTUM,
            "weight_decay": 0.0,
            # Of two neurons that read two one is easily dead; with τ = 0.8 the layer would stay as narrow as that.
            "grow_options": {
                "every": 2,
                "tau": {"default": 0.8, "classifier": 0.4},
                "by": 1.0,
                "least": 2,
                "params": 20_000,
                "then": 6,
            },
        },
    ),
    **_growing(),
}
