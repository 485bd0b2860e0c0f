"""The networks are the ones of the literature: their sizes, costs, shapes and initial weights."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dessilbi.models import create, input_shape, names

# Narrow versions, cheap enough to run; the second number is the side of a small image that the network takes.
THIN = {
    "lenet5": ((2, 3, 5, 7), 28),
    "resnet20": ((3, 5, 6, *range(2, 11)), 16),
    "vgg16": (tuple(range(2, 16)), 32),
    "vgg19": (tuple(range(2, 19)), 32),
    "alexnet": ((2, 3, 4, 5, 6, 7, 8), 63),
    "resnet18": ((3, 4, 5, 6, *range(2, 10)), 64),
    "resnet50_imagenet": ((3, 4, 5, 6, 7, *range(2, 34)), 64),
}


def parameters(network):
    return sum(parameter.numel() for parameter in network.parameters())


def on_meta(name, **kwargs):
    with torch.device("meta"):
        return create(name, **kwargs)


def macs(name):
    network = on_meta(name).eval()
    with FlopCounterMode(display=False) as counter:
        network(torch.empty(1, *input_shape(name), device="meta"))
    return counter.get_total_flops() / 2


def thin(name):
    widths, side = THIN[name]
    network = create(name, num_classes=4, widths=widths).eval()
    return network, torch.randn(2, input_shape(name)[0], side, side)


def conv(before, after, size):
    return before * after * size * size


def batch_norm(width):
    return 2 * width


def linear(before, after):
    return (before + 1) * after


def lenet5_parameters(channels, classes):
    convolutions = conv(channels, 6, 5) + 6 + conv(6, 16, 5) + 16 + conv(16, 120, 5) + 120
    return convolutions + linear(120, 84) + linear(84, classes)


def cifar_resnet_parameters(n, channels, classes):
    total = conv(channels, 16, 3) + batch_norm(16)
    total += n * (2 * conv(16, 16, 3) + 2 * batch_norm(16))
    for before, after in ((16, 32), (32, 64)):
        total += conv(before, after, 3) + (2 * n - 1) * conv(after, after, 3) + 2 * n * batch_norm(after)
    return total + linear(64, classes)


def vgg_parameters(deep, channels, classes):
    widths = [64] * 2 + [128] * 2 + [256] * deep + [512] * 2 * deep
    befores = [channels, *widths[:-1]]
    features = sum(conv(before, after, 3) + batch_norm(after) for before, after in zip(befores, widths, strict=True))
    return features + linear(512, 512) + linear(512, classes)


@pytest.mark.parametrize(("channels", "classes"), [(1, 10), (3, 47)])
def test_lenet5_has_the_parameters_of_its_definition(channels, classes):
    network = on_meta("lenet5", num_classes=classes, in_channels=channels)
    assert parameters(network) == lenet5_parameters(channels, classes)


@pytest.mark.parametrize(("channels", "classes"), [(3, 10), (1, 100)])
@pytest.mark.parametrize("depth", [20, 32, 44, 50, 56, 110])
def test_cifar_resnets_have_the_parameters_of_their_definition(depth, channels, classes):
    network = on_meta(f"resnet{depth}", num_classes=classes, in_channels=channels)
    assert parameters(network) == cifar_resnet_parameters((depth - 2) // 6, channels, classes)
    weights = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(weights) == depth


@pytest.mark.parametrize(("channels", "classes"), [(3, 10), (1, 100)])
@pytest.mark.parametrize(("name", "deep"), [("vgg16", 3), ("vgg19", 4)])
def test_vggs_have_the_parameters_of_their_definition(name, deep, channels, classes):
    network = on_meta(name, num_classes=classes, in_channels=channels)
    assert parameters(network) == vgg_parameters(deep, channels, classes)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("alexnet", 61_100_840), ("resnet18", 11_689_512), ("resnet50_imagenet", 25_557_032)],
)
def test_imagenet_networks_have_torchvisions_parameters(name, expected):
    assert parameters(on_meta(name)) == expected


@pytest.mark.parametrize(
    ("name", "thousands", "rounding"),
    [
        ("lenet5", 61.7, 0.1),
        ("resnet20", 270, 10),
        ("resnet110", 1_700, 100),
        ("vgg16", 15_000, 1_000),
        ("vgg19", 20_000, 1_000),
        ("alexnet", 61_000, 1_000),
        ("resnet18", 11_700, 100),
        ("resnet50_imagenet", 25_600, 100),
    ],
)
def test_parameters_round_to_the_stated_ones(name, thousands, rounding):
    assert abs(parameters(on_meta(name)) / 1e3 - thousands) <= rounding / 2


@pytest.mark.parametrize(
    ("name", "millions", "rounding"),
    [("lenet5", 0.42, 0.01), ("resnet20", 41, 1), ("vgg16", 313, 1), ("vgg19", 398, 1)],
)
def test_macs_round_to_the_stated_ones(name, millions, rounding):
    assert abs(macs(name) / 1e6 - millions) <= rounding / 2


def test_resnet56_macs():
    """Convolutions and fc alone are 125.49 M; the stated 126 M is reached with the shortcuts' additions."""
    first = conv(3, 16, 3) * 32**2
    stages = sum(
        (conv(before, after, 3) + 17 * conv(after, after, 3)) * side**2
        for before, after, side in ((16, 16, 32), (16, 32, 16), (32, 64, 8))
    )
    assert macs("resnet56") == first + stages + 64 * 10
    additions = 9 * (16 * 32**2 + 32 * 16**2 + 64 * 8**2)
    assert round((macs("resnet56") + additions) / 1e6) == 126


def test_lenet5_macs():
    expected = 28**2 * conv(1, 6, 5) + 10**2 * conv(6, 16, 5) + conv(16, 120, 5) + 120 * 84 + 84 * 10
    assert macs("lenet5") == expected


@pytest.mark.parametrize("name", names())
def test_output_is_one_score_a_class(name):
    network = on_meta(name, num_classes=7).eval()
    assert network(torch.empty(3, *input_shape(name), device="meta")).shape == (3, 7)


@pytest.mark.parametrize("name", names())
def test_input_channels_are_free(name):
    _, *size = input_shape(name)
    network = on_meta(name, in_channels=5).eval()
    network(torch.empty(1, 5, *size, device="meta"))


@pytest.mark.parametrize("name", names())
def test_fx_traces_the_full_network(name):
    torch.fx.symbolic_trace(on_meta(name)).graph.lint()


@pytest.mark.parametrize("name", THIN)
def test_fx_trace_computes_the_same(name):
    network, x = thin(name)
    traced = torch.fx.symbolic_trace(network)
    assert torch.equal(traced(x), network(x))


@pytest.mark.parametrize("name", [name for name in THIN if name != "vgg19"])
def test_export_computes_the_same_for_any_batch_size(name):
    network, x = thin(name)
    exported = torch.export.export(network, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    more = torch.cat([x, 2 * x, 3 * x])
    torch.testing.assert_close(exported.module()(more), network(more))


@pytest.mark.parametrize("name", THIN)
def test_every_parameter_gets_a_gradient(name):
    network, x = thin(name)
    network.train()
    network(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.parametrize("name", names())
def test_only_alexnet_is_random(name):
    drops = any(isinstance(module, nn.Dropout) for module in on_meta(name).modules())
    assert drops == (name == "alexnet")


@pytest.mark.parametrize("name", names())
def test_batch_normalisation_in_all_but_the_two_old_networks(name):
    convs = [m for m in on_meta(name).modules() if isinstance(m, nn.Conv2d)]
    norms = [m for m in on_meta(name).modules() if isinstance(m, nn.BatchNorm2d)]
    if name in ("lenet5", "alexnet"):
        assert not norms
        assert all(m.bias is not None for m in convs)
    else:
        assert [m.num_features for m in norms] == [m.out_channels for m in convs]
        assert all(m.bias is None for m in convs)


@pytest.mark.parametrize("name", ["lenet5", "resnet32", "resnet18"])
def test_initial_weights_are_he_normal(name):
    torch.manual_seed(0)
    for module in create(name).modules():
        if isinstance(module, nn.Conv2d):
            fan = module.out_channels * math.prod(module.kernel_size)
        elif isinstance(module, nn.Linear):
            fan = module.in_features
        else:
            continue
        spread = math.sqrt(2 / fan)
        # Five standard errors of a sample of that many normal values.
        count = module.weight.numel()
        assert abs(module.weight.mean()) < 5 * spread / math.sqrt(count)
        assert abs(module.weight.std() / spread - 1) < 5 / math.sqrt(2 * count)
        assert module.bias is None or not module.bias.any()


def test_batch_normalisation_starts_at_one_and_zero():
    for module in create("resnet20").modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()


def test_lenet5_centres_28x28_in_zeros():
    network = create("lenet5").eval()
    small = torch.randn(2, 1, 28, 28)
    large = torch.zeros(2, 1, 32, 32)
    large[:, :, 2:30, 2:30] = small
    assert torch.equal(network(small), network(large))
    odd = torch.zeros(2, 1, 32, 32)
    odd[:, :, 1:30, 12:20] = small[:, :, :1, :8].expand(2, 1, 29, 8)
    assert torch.equal(network(small[:, :, :1, :8].expand(2, 1, 29, 8)), network(odd))


def test_lenet5_refuses_to_crop():
    with pytest.raises(ValueError, match="at most 32x32, not 28x33"):
        create("lenet5")(torch.zeros(1, 1, 28, 33))


def test_names_of_the_layers():
    """They are in users' checkpoints and selections: a change of one breaks those."""
    vgg = on_meta("vgg16")
    assert [int(n) for n, m in vgg.features.named_children() if isinstance(m, nn.Conv2d)] == [
        *(0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40)
    ]
    assert [n for n, _ in vgg.classifier.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    lenet = on_meta("lenet5")
    assert [n for n, _ in lenet.named_parameters() if n.endswith("weight")] == [
        *("features.0.weight", "features.3.weight", "features.6.weight"),
        *("classifier.0.weight", "classifier.2.weight"),
    ]
    resnet = on_meta("resnet20")
    assert [n for n, _ in resnet.named_children()] == [*("conv1", "bn1", "layer1", "layer2", "layer3", "avgpool", "fc")]
    assert [n for n, _ in resnet.layer2[0].named_children()] == ["conv1", "bn1", "conv2", "bn2", "downsample"]


def test_imagenet_layers_are_named_as_in_torchvision():
    alexnet = [name for name in on_meta("alexnet").state_dict() if name.endswith("weight")]
    assert alexnet == [
        *(f"features.{i}.weight" for i in (0, 3, 6, 8, 10)),
        *(f"classifier.{i}.weight" for i in (1, 4, 6)),
    ]
    resnet18 = on_meta("resnet18").state_dict()
    assert len(resnet18) == 20 + 20 * 5 + 2
    assert resnet18["layer2.0.downsample.0.weight"].shape == (128, 64, 1, 1)
    assert not [name for name in resnet18 if name.startswith("layer1") and "downsample" in name]
    resnet50 = on_meta("resnet50_imagenet").state_dict()
    assert len(resnet50) == 53 + 53 * 5 + 2
    assert resnet50["layer1.0.downsample.0.weight"].shape == (256, 64, 1, 1)
    assert resnet50["layer4.2.conv3.weight"].shape == (2048, 512, 1, 1)
    assert "layer4.2.bn3.num_batches_tracked" in resnet50


def test_bottleneck_stride_is_in_the_middle():
    block = on_meta("resnet50_imagenet").layer2[0]
    assert [block.conv1.stride, block.conv2.stride, block.conv3.stride] == [(1, 1), (2, 2), (1, 1)]
