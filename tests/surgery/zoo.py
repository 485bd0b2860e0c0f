"""The networks that surgery is tested on, and what the tests do to them: random values, selections, comparison."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dessilbi.models import create
from tests.surgery import nets

TOL = 1e-5
WRITERS = (nn.modules.conv._ConvNd, nn.Linear)
_BATCH_NORMS = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class Net:
    """An architecture: `factory()` makes it, `inputs(batch)` an input for it.

    `outputs`: the layers that write its results, which a random selection leaves alone (None: the last layer).
    `branches`: sets of layers; where a whole set is off, a part of the network is provably nothing.
    `may_refuse`: the module that a refusal has to name, where surgery may decline to touch what flows into it.
    """

    factory: Callable[[], nn.Module]
    inputs: Callable[..., Any]
    outputs: tuple[str, ...] | None = None
    branches: tuple[tuple[str, ...], ...] = ()
    may_refuse: str | None = None

    def build(self, seed: int = 0) -> nn.Module:
        """The network in eval mode, with random values."""
        torch.manual_seed(seed)
        return randomise(self.factory(), seed, self.inputs(8)).eval()

    def selection(self, model: nn.Module, level: str, keep: float = 0.6, seed: int = 0):
        return random_selection(model, level, keep, seed, outputs=self.outputs, branches=self.branches)


def _images(*shape: int) -> Callable[..., Tensor]:
    """A batch of inputs of this shape; other values at every batch size."""

    def inputs(batch: int = 2) -> Tensor:
        return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))

    return inputs


def _image_and_vector(batch: int = 2) -> tuple[Tensor, Tensor]:
    return _images(3, 5, 6)(batch), _images(5)(batch + 100)[:batch]


def _tokens(batch: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(1, 30, (batch, 6), generator=torch.Generator().manual_seed(batch))
    mask = torch.ones(batch, 6, dtype=torch.long)
    mask[0, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _hf_bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=20,
        max_position_embeddings=8,
        num_labels=4,
    )
    return transformers.BertForSequenceClassification(config)


def _hf_resnet(layer_type: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 1], layer_type=layer_type, num_labels=4
    )
    return transformers.ResNetForImageClassification(config)


def _cifar_blocks(*blocks: str) -> tuple[tuple[str, ...], ...]:
    return tuple((f"{block}.conv1", f"{block}.conv2") for block in blocks)


_INCEPTION = tuple(
    (f"mixed{i}.{branch}",)
    for i in (1, 2)
    for branch in ("branch1.conv", "branch2.1.conv", "branch3.1.conv", "branch4.1.conv")
)
_VIT_MLP = (("blocks.0.mlp.3",), ("blocks.1.mlp.0", "blocks.1.mlp.3"))
_HF_RESNET = "resnet.encoder.stages"

FOREIGN: dict[str, Net] = {
    "mlp": Net(nets.MLP, _images(7)),
    "vgg_flat": Net(nets.VggFlat, _images(3, 8, 12)),
    "relu_chain": Net(functools.partial(nets.Chain, nn.ReLU), _images(3, 6, 8)),
    "prelu": Net(functools.partial(nets.Chain, lambda: nn.PReLU(1)), _images(3, 6, 8)),
    "prelu_channels": Net(nets.ChannelPReLU, _images(3, 6, 8)),
    "sigmoid_chain": Net(functools.partial(nets.Chain, nn.Sigmoid), _images(3, 6, 8)),
    "softplus_chain": Net(functools.partial(nets.Chain, nn.Softplus), _images(3, 6, 8)),
    "tanh_gelu_chain": Net(
        functools.partial(nets.Chain, lambda: nn.Sequential(nn.Tanh(), nn.GELU(), nn.ELU(), nn.Dropout2d())),
        _images(3, 6, 8),
    ),
    "sigmoid_after_norm": Net(functools.partial(nets.Chain, nn.Sigmoid, nn.BatchNorm2d, False), _images(3, 6, 8)),
    "bn_no_affine": Net(
        functools.partial(nets.Chain, nn.ReLU, functools.partial(nn.BatchNorm2d, affine=False), False),
        _images(3, 6, 8),
    ),
    "bn_no_running": Net(
        functools.partial(nets.Chain, nn.ReLU, functools.partial(nn.BatchNorm2d, track_running_stats=False), False),
        _images(3, 6, 8),
    ),
    "instance_norm": Net(
        functools.partial(nets.Chain, nn.ReLU, functools.partial(nn.InstanceNorm2d, affine=True), False),
        _images(3, 6, 8),
    ),
    "instance_norm_plain": Net(functools.partial(nets.Chain, nn.ReLU, nn.InstanceNorm2d, False), _images(3, 6, 8)),
    "in_place": Net(nets.InPlace, _images(3, 6, 8)),
    "out_of_order": Net(nets.OutOfOrder, _images(3, 6, 8), outputs=("fc",)),
    "tied": Net(nets.Tied, _images(3, 6, 8)),
    "tied_weights": Net(nets.TiedWeights, _images(10)),
    "conv1d": Net(nets.Conv1dNet, _images(2, 20)),
    "conv3d": Net(nets.Conv3dNet, _images(1, 4, 4, 8)),
    "autoencoder": Net(nets.Autoencoder, _images(1, 8, 8)),
    "resnet_lambda": Net(
        functools.partial(nets.SmallResNet, nets.LambdaBlock),
        _images(3, 8, 12),
        branches=_cifar_blocks("layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0", "layer3.1"),
    ),
    "resnet_inline_pad": Net(
        nets.InlineResNet,
        _images(3, 8, 12),
        branches=_cifar_blocks("blocks.0", "blocks.1", "blocks.2", "blocks.3"),
    ),
    "resnet_preact": Net(nets.PreActResNet, _images(3, 8, 12), branches=_cifar_blocks("layers.0", "layers.2")),
    "resnext": Net(
        nets.ResNeXt,
        _images(3, 6, 8),
        branches=tuple(tuple(f"blocks.{i}.conv{j}" for j in (1, 2, 3)) for i in (0, 1)),
    ),
    "mobilenet_v2": Net(
        nets.MobileNetV2,
        _images(3, 16, 24),
        branches=tuple(tuple(f"features.{i}.conv.{j}" for j in (0, 3, 6)) for i in (3, 4)),
    ),
    "mobilenet_v3": Net(
        nets.MobileNetV3,
        _images(3, 8, 12),
        branches=(("project.0",), ("expand.0", "depthwise.0", "se.fc1", "se.fc2", "project.0")),
    ),
    "densenet": Net(
        nets.DenseNet,
        _images(3, 8, 12),
        branches=tuple((f"features.{i}.denselayer{j}.conv2",) for i in (3, 5) for j in (1, 2)),
    ),
    "inception": Net(nets.Inception, _images(3, 7, 9), branches=_INCEPTION),
    "shufflenet_v2": Net(nets.ShuffleNetV2, _images(3, 8, 12)),
    "shufflenet_v1": Net(nets.ShuffleNetV1, _images(3, 6, 8)),
    "unequal_split": Net(nets.UnequalSplit, _images(3, 6, 8)),
    "unet_transposed": Net(functools.partial(nets.UNet, True), _images(1, 9, 14)),
    "unet_nearest": Net(functools.partial(nets.UNet, False), _images(1, 8, 12)),
    "super_resolution": Net(nets.SuperResolution, _images(1, 5, 6)),
    "group_norm": Net(nets.GroupNormNet, _images(3, 6, 8)),
    "convnext": Net(
        nets.ConvNeXt,
        _images(3, 8, 12),
        branches=tuple((f"blocks.{i}.dwconv", f"blocks.{i}.pwconv1", f"blocks.{i}.pwconv2") for i in (0, 1)),
    ),
    "local_response_norm": Net(nets.LocalResponseNorm, _images(3, 6, 8), may_refuse="lrn"),
    "spatial_attention": Net(nets.SpatialAttention, _images(3, 6, 8)),
    "channel_softmax": Net(nets.ChannelSoftmax, _images(3, 6, 8)),
    "constant_shift": Net(nets.ConstantShift, _images(3, 6, 8)),
    "vit_hand": Net(functools.partial(nets.ViT, nets.HandAttention), _images(3, 8, 12), branches=_VIT_MLP),
    "vit_plain": Net(functools.partial(nets.ViT, nets.PlainAttention), _images(3, 8, 12), branches=_VIT_MLP),
    "vit_mha": Net(functools.partial(nets.ViT, nets.MultiheadAttention), _images(3, 8, 12), branches=_VIT_MLP),
    "multi_input_output": Net(nets.MultiInputOutput, _image_and_vector, outputs=("kind", "box", "map")),
    "returns_features": Net(nets.ReturnsFeatures, _images(3, 6, 8)),
    "hf_bert": Net(_hf_bert, _tokens),
    "hf_resnet_basic": Net(
        functools.partial(_hf_resnet, "basic"),
        _images(3, 32, 48),
        branches=tuple(
            tuple(f"{_HF_RESNET}.{block}.layer.{j}.convolution" for j in (0, 1))
            for block in ("0.layers.0", "0.layers.1", "1.layers.0")
        ),
    ),
    "hf_resnet_bottleneck": Net(functools.partial(_hf_resnet, "bottleneck"), _images(3, 32, 48)),
}

# An operation that no channel map exists for. It is not in the list above: part of its selections must be refused.
GRU = Net(nets.ConvGRU, _images(2, 9))

_VGG16 = (4, 6, 6, 8, 8, 6, 8, 10, 8, 8, 10, 8, 8)
_BUILT_IN: dict[str, tuple[tuple[int, ...] | None, tuple[int, int, int], tuple[str, ...]]] = {
    # widths, shape of the input, and the parts of a residual block
    "lenet5": (None, (1, 28, 28), ()),
    "resnet20": (None, (3, 16, 16), ("conv1", "conv2")),
    "resnet32": ((8, 12, 16), (3, 8, 8), ("conv1", "conv2")),
    "resnet44": ((4, 8, 16), (3, 8, 8), ("conv1", "conv2")),
    "resnet50": ((4, 8, 16), (3, 8, 8), ("conv1", "conv2")),
    "resnet56": ((8, 16, 32), (3, 8, 8), ("conv1", "conv2")),
    "resnet110": ((4, 6, 8), (3, 8, 8), ("conv1", "conv2")),
    "vgg16": ((*_VGG16, 12), (3, 32, 32), ()),
    "vgg19": ((*_VGG16, 6, 10, 8, 12), (3, 32, 32), ()),
    "alexnet": ((6, 8, 10, 8, 6, 16, 12), (3, 64, 64), ()),
    "resnet18": ((6, 8, 10, 12), (3, 64, 64), ("conv1", "conv2")),
    "resnet50_imagenet": ((8, 16, 24, 32, 40), (3, 64, 64), ("conv1", "conv2", "conv3")),
}


def built_in_options(name: str) -> dict[str, Any]:
    """What the tests hand to `dessilbi.models.create` for this network, widths that are quick included."""
    widths = _BUILT_IN[name][0]
    return {"num_classes": 10, **({"widths": list(widths)} if widths else {})}


def built_in(name: str) -> Net:
    """A network of `dessilbi.models`, narrow where the layers and not the widths are the point."""
    _, shape, parts = _BUILT_IN[name]
    with torch.device("meta"):
        model = create(name, **built_in_options(name))
    blocks = [path for path, module in model.named_modules() if type(module).__name__ in ("BasicBlock", "Bottleneck")]
    return Net(
        functools.partial(create, name, **built_in_options(name)),
        _images(*shape),
        branches=tuple(tuple(f"{block}.{part}" for part in parts) for block in blocks),
    )


# -- values ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def randomise(model: nn.Module, seed: int, inputs: Any = None) -> nn.Module:
    """Random values everywhere, in place: no bias, shift, scale or running mean is zero, no variance is one.

    With `inputs` the running statistics are near those of the data (but not equal to them), so that the values
    neither die out nor explode in a deep network.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor, std: float) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like.dtype) * std

    def uniform(like: Tensor, low: float, high: float) -> Tensor:
        return torch.rand(like.shape, generator=generator).to(like.dtype) * (high - low) + low

    def sign(like: Tensor) -> Tensor:
        return torch.where(uniform(like, 0, 1) < 0.25, -1.0, 1.0).to(like.dtype)

    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if isinstance(module, nn.PReLU):
                p.copy_(uniform(p, 0.1, 0.5))
            elif name == "weight" and isinstance(module, nn.Embedding):
                p.copy_(normal(p, 1.0))
            elif p.ndim >= 2 and name.endswith("weight"):
                p.copy_(normal(p, math.sqrt(2 * p.shape[0] / p.numel())))
            elif name == "weight":
                p.copy_(uniform(p, 0.5, 1.5) * sign(p))
            else:
                p.copy_(uniform(p, 0.1, 0.5) * sign(p))
        if isinstance(module, _BATCH_NORMS) and module.running_mean is not None:
            module.running_mean.copy_(normal(module.running_mean, 0.3))
            module.running_var.copy_(uniform(module.running_var, 0.5, 1.5))
    if inputs is not None:
        _calibrate(model, inputs, normal, uniform)
    return model


def _calibrate(model: nn.Module, inputs: Any, normal: Callable[..., Tensor], uniform: Callable[..., Tensor]) -> None:
    def settle(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if module.running_mean is None:
            return
        x = args[0].transpose(0, 1).flatten(1)
        var = x.var(1)
        var = var.clamp_min(0.1 * float(var.mean()) + 1e-3)
        module.running_mean.copy_(x.mean(1) + normal(var, 0.3) * var.sqrt())
        module.running_var.copy_(var * uniform(var, 0.7, 1.4))

    hooks = [m.register_forward_pre_hook(settle) for m in model.modules() if isinstance(m, _BATCH_NORMS)]
    training = model.training
    model.eval()
    call(model, inputs)
    model.train(training)
    for hook in hooks:
        hook.remove()


# -- selections --------------------------------------------------------------------------------------------------


def writers(model: nn.Module) -> dict[str, nn.Module]:
    """The convolutions and linear layers, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, WRITERS)}


def width(module: nn.Module) -> int:
    """The number of filters of a convolution, transposed and grouped ones too, or of neurons of a linear layer."""
    return module.out_features if isinstance(module, nn.Linear) else module.out_channels


def _selectable(model: nn.Module, outputs: Iterable[str] | None) -> dict[str, nn.Module]:
    """The layers by path, without those that write the results, and one of those that share a weight."""
    found = writers(model)
    for path in (list(found)[-1],) if outputs is None else outputs:
        del found[path]
    own = dict(model.named_parameters())
    return {path: module for path, module in found.items() if f"{path}.weight" in own}


def random_masks(model: nn.Module, keep: float, seed: int, outputs: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Filter masks by path of the layer: at least one filter is on, and one off where there are two."""
    generator = torch.Generator().manual_seed(seed)
    masks = {}
    for path, module in _selectable(model, outputs).items():
        order = torch.rand(width(module), generator=generator)
        mask = order < keep
        mask[order.argmax()] = False
        mask[order.argmin()] = True
        masks[path] = mask
    return masks


def selection_of(masks: Mapping[str, Tensor], level: str | None = None):
    """A Selection of layers, by their paths."""
    from dessilbi.selection import Selection

    return Selection({f"{path}.weight": mask for path, mask in masks.items()}, level=level)


def random_selection(
    model: nn.Module,
    level: str,
    keep: float,
    seed: int,
    outputs: Iterable[str] | None = None,
    branches: Sequence[Sequence[str]] = (),
):
    """A random Selection of all convolutions and linear layers but the `outputs` (by default the last one).

    weight: single elements, and some whole rows. filter: filters and neurons, one at least stays. layer: some of the
    `branches`, one at least, are off, each with all its layers.
    """
    if level == "filter":
        return selection_of(random_masks(model, keep, seed, outputs), level)
    generator = torch.Generator().manual_seed(seed)
    if level == "layer":
        if not branches:
            raise ValueError("branches is empty: say which layers may be off together")
        off = torch.rand(len(branches), generator=generator) > keep
        off[int(torch.randint(len(branches), (1,), generator=generator))] = True
        masks = {path: torch.ones(1, dtype=torch.bool) for path in _selectable(model, outputs)}
        masks |= {path: torch.zeros(1, dtype=torch.bool) for i in off.nonzero() for path in branches[i]}
        return selection_of(masks, level)
    masks = {}
    for path, module in _selectable(model, outputs).items():
        weight = module.weight
        mask = torch.rand(weight.shape, generator=generator) < keep
        mask.view(-1)[int(torch.randint(weight.numel(), (1,), generator=generator))] = True
        filters = torch.rand(weight.shape[0], generator=generator) < keep
        filters[int(mask.flatten(1).any(1).nonzero()[0])] = True
        masks[path] = mask & filters.view(-1, *[1] * (weight.ndim - 1))
    return selection_of(masks, level)


def coherent_selection(model: nn.Module, keep: float = 0.5, off: str = "first", outputs: Iterable[str] | None = None):
    """The same channels, the `off` ("first" or "last") ones, in all layers of one width.

    So all writers of a residual stream agree, and something is really removable there too.
    """
    masks = {}
    for path, module in _selectable(model, outputs).items():
        n = width(module)
        kept = max(1, round(n * keep))
        index = torch.arange(n)
        masks[path] = index >= n - kept if off == "first" else index < kept
    return selection_of(masks, "filter")


# -- running and comparing ---------------------------------------------------------------------------------------


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's result for example inputs: a tensor, a tuple of arguments, or a dict of keyword arguments."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Any) -> Any:
    return call(model.eval(), inputs)


def _leaves(x: Any) -> list[tuple[str, Tensor]]:
    if isinstance(x, Tensor):
        return [("", x)]
    if dataclasses.is_dataclass(x) and not isinstance(x, Mapping):
        x = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    items = x.items() if isinstance(x, Mapping) else enumerate(x) if isinstance(x, (tuple, list)) else ()
    return [(f".{key}{path}", leaf) for key, value in items for path, leaf in _leaves(value)]


def difference(a: Any, b: Any) -> float:
    """The largest difference of two results, relative to the largest value of `a` where that is above one."""
    ours, theirs = _leaves(a), _leaves(b)
    assert ours, "nothing to compare"
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    worst = 0.0
    for (path, x), (_, y) in zip(ours, theirs, strict=True):
        assert x.shape == y.shape, f"{path}: {tuple(x.shape)} and {tuple(y.shape)}"
        assert x.isfinite().all()
        assert y.isfinite().all()
        x, y = x.detach().double(), y.detach().double()
        worst = max(worst, float((x - y).abs().max()) / max(1.0, float(x.abs().max())))
    return worst


def outputs_close(a: Any, b: Any, tol: float = 1e-5) -> bool:
    """Whether two results (tensors, tuples, dicts, dataclasses of them) are equal to `tol`."""
    return difference(a, b) <= tol


def parameters(model: nn.Module) -> int:
    """How many numbers a model learns, shared ones once."""
    return sum(p.numel() for p in model.parameters())


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def unchanged(model: nn.Module, before: Mapping[str, Tensor]) -> bool:
    """Whether the state_dict is the snapshot, bit for bit."""
    now = model.state_dict()
    return list(now) == list(before) and all(
        now[name].dtype == value.dtype and torch.equal(now[name], value) for name, value in before.items()
    )


def checked_shrink(net, model, sel, model_inputs=None):
    """`shrink`, compared with the masked network at two batch sizes; the original must stay as it is."""
    from dessilbi.surgery import shrink

    inputs = net.inputs(2) if model_inputs is None else model_inputs
    batches = [inputs, net.inputs(3)]
    before = snapshot(model)
    with sel.applied(model):
        expected = [evaluate(model, x) for x in batches]
    assert unchanged(model, before)
    small = shrink(model, sel, inputs)
    assert unchanged(model, before)
    assert isinstance(small, nn.Module)
    assert not {p.data_ptr() for p in small.parameters()} & {p.data_ptr() for p in model.parameters()}
    for x, y in zip(batches, expected, strict=True):
        assert difference(y, evaluate(small, x)) <= TOL
    assert parameters(small) <= parameters(model)
    return small
