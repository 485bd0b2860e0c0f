"""Every width can be given, goes to the layer it names, and is refused with a remedy when it is wrong."""

import pytest
import torch
from torch import nn

from dessilbi.models import create, names
from dessilbi.models.resnet_cifar import CifarResNet


def on_meta(name, **kwargs):
    with torch.device("meta"):
        return create(name, **kwargs)


def out_widths(network, kind=nn.Conv2d | nn.Linear):
    return {name: module.weight.shape[0] for name, module in network.named_modules() if isinstance(module, kind)}


@pytest.mark.parametrize(("name", "count"), [("lenet5", 4), ("vgg16", 14), ("vgg19", 17), ("alexnet", 7)])
def test_chains_take_one_width_a_layer(name, count):
    widths = tuple(range(11, 11 + count))
    network = on_meta(name, num_classes=3, widths=widths)
    assert [*out_widths(network).values()] == [*widths, 3]


def test_cifar_resnet_streams_and_inner_widths():
    streams, inner = (5, 7, 12), tuple(range(20, 29))
    found = out_widths(on_meta("resnet20", num_classes=3, widths=streams + inner))
    assert found.pop("conv1") == 5
    assert found.pop("fc") == 3
    blocks = [f"layer{stage}.{block}" for stage in (1, 2, 3) for block in range(3)]
    assert [found.pop(f"{block}.conv1") for block in blocks] == [*inner]
    assert [found.pop(f"{block}.conv2") for block in blocks] == [5] * 3 + [7] * 3 + [12] * 3
    assert not found


def test_resnet18_streams_and_inner_widths():
    streams, inner = (5, 7, 12, 4), tuple(range(20, 28))
    found = out_widths(on_meta("resnet18", num_classes=3, widths=streams + inner))
    assert found.pop("conv1") == 5
    assert found.pop("fc") == 3
    blocks = [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in range(2)]
    assert [found.pop(f"{block}.conv1") for block in blocks] == [*inner]
    assert [found.pop(f"{block}.conv2") for block in blocks] == [5, 5, 7, 7, 12, 12, 4, 4]
    assert [found.pop(f"layer{stage}.0.downsample.0") for stage in (2, 3, 4)] == [7, 12, 4]
    assert not found


def test_resnet50_imagenet_streams_and_inner_widths():
    streams, inner = (3, 5, 7, 12, 4), tuple(range(20, 52))
    found = out_widths(on_meta("resnet50_imagenet", num_classes=3, widths=streams + inner))
    assert found.pop("conv1") == 3
    assert found.pop("fc") == 3
    blocks = [f"layer{s}.{b}" for s, count in zip((1, 2, 3, 4), (3, 4, 6, 3), strict=True) for b in range(count)]
    assert [found.pop(f"{block}.{conv}") for block in blocks for conv in ("conv1", "conv2")] == [*inner]
    assert [found.pop(f"{block}.conv3") for block in blocks] == [5] * 3 + [7] * 4 + [12] * 6 + [4] * 3
    assert [found.pop(f"layer{stage}.0.downsample.0") for stage in (1, 2, 3, 4)] == [5, 7, 12, 4]
    assert not found


@pytest.mark.parametrize(
    ("name", "short", "full"),
    [
        ("resnet20", (8, 8, 8), (8, 8, 8, *[8] * 9)),
        ("resnet18", (6, 8, 9, 7), (6, 8, 9, 7, 6, 6, 8, 8, 9, 9, 7, 7)),
        (
            "resnet50_imagenet",
            (2, 8, 9, 16, 3),
            (2, 8, 9, 16, 3, *[2] * 6, *[2] * 8, *[4] * 12, *[1] * 6),
        ),
    ],
)
def test_inner_widths_follow_the_streams(name, short, full):
    assert out_widths(on_meta(name, widths=short)) == out_widths(on_meta(name, widths=full))


@pytest.mark.parametrize(("name", "count"), [("resnet18", 3), ("resnet50_imagenet", 4)])
def test_equal_streams_keep_their_projections(name, count):
    network = on_meta(name, widths=[8] * (5 if count == 4 else 4))
    projections = [n for n in out_widths(network, nn.Conv2d) if "downsample" in n]
    assert len(projections) == count


@pytest.mark.parametrize("name", names())
def test_a_wrong_number_of_widths_is_refused(name):
    with pytest.raises(ValueError, match=r"widths = \[4, 4\] has 2 entries; give .*conv1"):
        create(name, widths=[4, 4])


def test_the_refusal_lists_what_to_give():
    with pytest.raises(ValueError, match="give 4: conv1, conv2, conv3, fc"):
        create("lenet5", widths=[4] * 5)
    with pytest.raises(ValueError, match=r"give 3, the streams layer1, layer2, layer3; or 12, .*layer3\.2\.conv1"):
        create("resnet20", widths=[4] * 11)


@pytest.mark.parametrize("bad", [0, -3])
def test_a_width_below_one_is_refused(bad):
    with pytest.raises(ValueError, match=rf"widths\[2\] \(conv3\) = {bad}: give a whole number of at least 1"):
        create("vgg16", widths=[8, 8, bad, *[8] * 11])
    with pytest.raises(ValueError, match=rf"widths\[4\] \(layer1\.1\.conv1\) = {bad}"):
        create("resnet20", widths=[8, 8, 8, 8, bad, *[8] * 7])
    with pytest.raises(ValueError, match=rf"widths\[0\] \(layer1\) = {bad}"):
        create("resnet18", widths=[bad, 8, 8, 8])


def test_a_width_that_is_not_whole_is_refused():
    with pytest.raises(TypeError, match=r"widths\[1\] \(conv2\) = 2\.5: give a whole number"):
        create("lenet5", widths=[6, 2.5, 120, 84])


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("argument", ["num_classes", "in_channels"])
def test_sizes_below_one_are_refused(name, argument):
    with torch.device("meta"), pytest.raises(ValueError, match=f"{argument} = 0: give"):
        create(name, **{argument: 0})


@pytest.mark.parametrize("depth", [2, 0, 21, 18])
def test_a_depth_outside_the_family_is_refused(depth):
    with pytest.raises(ValueError, match=f"depth = {depth}: give 6n"):
        CifarResNet(depth)


def test_any_depth_of_the_family_can_be_built():
    network = CifarResNet(14, widths=(4, 4, 4))
    assert [len(network.layer1), len(network.layer2), len(network.layer3)] == [2, 2, 2]
