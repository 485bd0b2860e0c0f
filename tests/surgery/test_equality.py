"""The small network gives what the masked one gives, and it is small by exactly what is provably nothing."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dessilbi.models import create, names
from dessilbi.selection import Selection
from dessilbi.surgery import shrink
from tests.surgery import zoo
from tests.surgery.zoo import (
    FOREIGN,
    TOL,
    checked_shrink,
    coherent_selection,
    difference,
    evaluate,
    random_masks,
    selection_of,
)


def shrunk_or_refused(net, model, sel):
    """`checked_shrink`; None where the network may be refused and is, by the name of the module."""
    if net.may_refuse is None:
        return checked_shrink(net, model, sel)
    try:
        return checked_shrink(net, model, sel)
    except ValueError as error:
        if net.may_refuse not in str(error):
            raise
        return None


def at(model, path):
    return model.get_submodule(path)


def ins(module):
    return module.in_features if isinstance(module, nn.Linear) else module.in_channels


def outs(module):
    return zoo.width(module)


def is_consistent(model):
    """Whether the sizes that the layers state are those of their tensors."""
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvTransposeNd):
            shape = (module.in_channels, module.out_channels // module.groups)
        elif isinstance(module, nn.modules.conv._ConvNd):
            shape = (module.out_channels, module.in_channels // module.groups)
        elif isinstance(module, nn.Linear):
            shape = (module.out_features, module.in_features)
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            assert module.running_mean.shape == module.running_var.shape == (module.num_features,)
            continue
        else:
            continue
        assert module.weight.shape[:2] == shape
        assert module.bias is None or module.bias.shape == (zoo.width(module),)
    return True


# -- everywhere --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["weight", "filter", "layer"])
@pytest.mark.parametrize("name", names())
def test_built_in_networks(name, level):
    net = zoo.built_in(name)
    if level == "layer" and not net.branches:
        pytest.skip("a plain network gets a transition, which is tested by itself")
    model = net.build()
    sel = net.selection(model, level)
    assert sel.level == level
    small = checked_shrink(net, model, sel)
    assert is_consistent(small)
    if level != "weight":
        assert zoo.parameters(small) < zoo.parameters(model)


@pytest.mark.parametrize("level", ["weight", "filter", "layer"])
@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_networks(name, level):
    net = FOREIGN[name]
    if level == "layer" and not net.branches:
        pytest.skip("no part of it may be missing")
    model = net.build()
    sel = net.selection(model, level)
    small = shrunk_or_refused(net, model, sel)
    assert small is None or is_consistent(small)
    if level == "layer":
        assert zoo.parameters(small) < zoo.parameters(model)


@pytest.mark.parametrize("off", ["first", "last"])
@pytest.mark.parametrize("name", [*FOREIGN, "resnet20", "resnet18", "resnet50_imagenet"])
def test_the_same_channels_off_in_all_layers_of_a_width(name, off):
    net = FOREIGN[name] if name in FOREIGN else zoo.built_in(name)
    model = net.build()
    sel = coherent_selection(model, off=off, outputs=net.outputs)
    small = shrunk_or_refused(net, model, sel)
    assert small is None or is_consistent(small)


# -- plain chains ------------------------------------------------------------------------------------------------

CHAINS = (
    "mlp", "vgg_flat", "relu_chain", "prelu", "prelu_channels", "tanh_gelu_chain", "bn_no_running", "instance_norm",
    "conv1d", "conv3d",
)  # fmt: skip


@pytest.mark.parametrize("name", ["vgg16", "vgg19", "lenet5", "alexnet", *CHAINS])
def test_a_chain_is_as_wide_as_its_masks(name):
    net = FOREIGN[name] if name in FOREIGN else zoo.built_in(name)
    model = net.build()
    masks = random_masks(model, 0.5, 3)
    small = checked_shrink(net, model, selection_of(masks))
    dense, layers = list(zoo.writers(model).values()), list(zoo.writers(small).items())
    # One channel of the layer before feeds as many inputs as the map has pixels where it is flattened.
    kept_before, width_before = ins(dense[0]), ins(dense[0])
    for was, (path, now) in zip(dense, layers, strict=True):
        kept = int(masks[path].sum()) if path in masks else outs(was)
        assert (ins(now), outs(now)) == (kept_before * (ins(was) // width_before), kept)
        kept_before, width_before = kept, outs(was)
    kept_weights = sum(p.numel() for layer in zoo.writers(small).values() for p in layer.parameters())
    assert kept_weights < sum(p.numel() for layer in dense for p in layer.parameters())


def test_vgg16_at_its_real_widths():
    net = zoo.Net(lambda: create("vgg16"), zoo.built_in("vgg16").inputs)
    model = net.build()
    masks = random_masks(model, 0.5, 1)
    small = checked_shrink(net, model, selection_of(masks))
    convs = [layer for layer in small.features if isinstance(layer, nn.Conv2d)]
    norms = [layer for layer in small.features if isinstance(layer, nn.BatchNorm2d)]
    widths = [int(mask.sum()) for mask in masks.values()]
    assert [conv.out_channels for conv in convs] == [norm.num_features for norm in norms] == widths[:13]
    assert [conv.in_channels for conv in convs] == [3, *widths[:12]]
    befores = [3, *widths[:12]]
    expected = sum(9 * i * o + 2 * o for i, o in zip(befores, widths[:13], strict=True))
    expected += (widths[12] + 1) * widths[13] + (widths[13] + 1) * 10
    assert zoo.parameters(small) == expected


@pytest.mark.parametrize(
    "name", ["sigmoid_chain", "softplus_chain", "sigmoid_after_norm", "bn_no_affine", "constant_shift"]
)
def test_a_zero_that_does_not_stay_zero_is_kept(name):
    net = FOREIGN[name]
    model = net.build()
    small = checked_shrink(net, model, net.selection(model, "filter"))
    assert [layer.weight.shape for layer in zoo.writers(small).values()] == [
        layer.weight.shape for layer in zoo.writers(model).values()
    ]


def test_a_filter_whose_bias_stays_is_a_constant():
    # At the weight level the bias is not masked, so that an empty row is not an absent channel.
    net = FOREIGN["relu_chain"]
    model = net.build()
    mask = torch.ones(8, 3, 3, 3, dtype=torch.bool)
    mask[2:4] = False
    sel = Selection({"conv1.weight": mask})
    assert checked_shrink(net, model, sel).conv1.out_channels == 8
    model.conv1.bias.data[2:4] = 0
    assert checked_shrink(net, model, sel).conv1.out_channels == 6


def test_nothing_selected_out_changes_nothing():
    net = zoo.built_in("resnet20")
    model = net.build()
    ones = {path: torch.ones(zoo.width(layer), dtype=torch.bool) for path, layer in zoo.writers(model).items()}
    for sel in (Selection({}), selection_of(ones)):
        small = checked_shrink(net, model, sel)
        assert zoo.unchanged(small, zoo.snapshot(model))


def test_results_keep_their_size():
    # Of what a network returns nothing goes, also where it is zero.
    net = zoo.built_in("vgg16")
    model = net.build()
    mask = torch.arange(10) % 2 == 0
    small = checked_shrink(net, model, selection_of({"classifier.2": mask}))
    assert small.classifier[2].out_features == 10
    net = FOREIGN["returns_features"]
    model = net.build()
    masks = random_masks(model, 0.5, 2)
    small = checked_shrink(net, model, selection_of(masks))
    assert (small.conv1.out_channels, small.conv2.out_channels) == (int(masks["conv1"].sum()), 8)


def test_shrinking_again():
    net = zoo.built_in("resnet20")
    model = net.build()
    once = checked_shrink(net, model, coherent_selection(model, 0.75, "last"))
    twice = checked_shrink(net, once, net.selection(once, "filter", seed=5))
    assert zoo.parameters(twice) < zoo.parameters(once) < zoo.parameters(model)


# -- residual streams --------------------------------------------------------------------------------------------


def alive_streams(masks, stages, shift):
    """Which channels of each stage's stream some layer writes; option A carries channel c to c + shift(stage)."""
    streams = []
    before = None
    for stage in stages:
        alive = torch.stack([masks[path] for path in stage]).any(0)
        if before is not None:
            carried = torch.zeros_like(alive)
            offset = shift(len(before), len(alive))
            carried[offset : offset + len(before)] = before
            alive = alive | carried
        streams.append(alive)
        before = alive
    return streams


def cifar_stages(model):
    return [
        [*(["conv1"] if i == 1 else []), *(f"layer{i}.{j}.conv2" for j in range(len(at(model, f"layer{i}"))))]
        for i in (1, 2, 3)
    ]


OPTION_A = {
    "resnet20": (lambda: zoo.built_in("resnet20"), lambda before, after: 0, "fc"),
    "resnet56": (lambda: zoo.built_in("resnet56"), lambda before, after: 0, "fc"),
    "resnet_lambda": (lambda: FOREIGN["resnet_lambda"], lambda before, after: after // 4, "linear"),
}


def written(masks, paths):
    """How many channels some of these layers write."""
    return int(torch.stack([masks[path] for path in paths]).any(0).sum())


@pytest.mark.parametrize("keep", [0.6, 0.15])
@pytest.mark.parametrize("name", OPTION_A)
def test_option_a_networks_with_random_masks(name, keep):
    make, shift, head = OPTION_A[name]
    net = make()
    model = net.build()
    masks = random_masks(model, keep, 4)
    small = checked_shrink(net, model, selection_of(masks))
    streams = [int(alive.sum()) for alive in alive_streams(masks, cifar_stages(model), shift)]
    if name == "resnet56" and keep == 0.6:  # ten writers: hardly a channel is off in all of them
        assert streams == [8, 16, 32]
    for i, stream in enumerate(streams, 1):
        for j in range(len(at(model, f"layer{i}"))):
            inner = int(masks[f"layer{i}.{j}.conv1"].sum())
            conv1, conv2 = at(small, f"layer{i}.{j}.conv1"), at(small, f"layer{i}.{j}.conv2")
            assert (outs(conv1), ins(conv2)) == (inner, inner)
            if i > 1 and j == 0:
                assert ins(conv1) == streams[i - 2]
            else:  # a later block may still write what is zero here
                so_far = [*(["conv1"] if i == 1 else []), *(f"layer{i}.{k}.conv2" for k in range(j))]
                assert written(masks, so_far) <= ins(conv1) <= stream
    assert at(small, head).in_features == streams[-1]


@pytest.mark.parametrize(("off", "streams"), [("last", (8, 16, 32)), ("first", (8, 24, 56))])
def test_option_a_streams_shrink_where_all_writers_agree(off, streams):
    # First half off: 0..7 of 16. The second stage takes 8..15 over from the first, and of its own has 16..31; the
    # third takes over 8..31, and has 32..63.
    net = zoo.built_in("resnet20")
    model = net.build()
    small = checked_shrink(net, model, coherent_selection(model, off=off))
    assert tuple(at(small, f"layer{i}.2.conv1").in_channels for i in (1, 2, 3)) == streams
    assert tuple(at(small, f"layer{i}.2.conv1").out_channels for i in (1, 2, 3)) == (8, 16, 32)
    assert small.fc.in_features == streams[-1]


@pytest.mark.parametrize("shortcut", [1, 2])
@pytest.mark.parametrize("case", ["before off", "after off", "both off", "new off", "before on in one writer"])
@pytest.mark.parametrize("name", ["resnet20", "resnet_lambda"])
def test_the_option_a_trap(name, case, shortcut):
    # Channel k of one stream is channel k + shift of the next one.
    make, shift, head = OPTION_A[name]
    net = make()
    model = net.build()
    stages = cifar_stages(model)
    ones = {path: torch.ones(outs(layer), dtype=torch.bool) for path, layer in zoo.writers(model).items()}
    masks = {path: ones[path].clone() for stage in stages for path in stage}
    widths = [len(masks[stage[0]]) for stage in stages]
    i, k = shortcut - 1, 3
    offset = shift(widths[i], widths[i + 1])
    new = offset + widths[i] if offset == 0 else 0  # a channel that the shortcut fills with zeros
    before, after = stages[i], stages[i + 1]
    if case == "before on in one writer":
        before = before[1:]
    for path in before if case in ("before off", "both off", "before on in one writer") else ():
        masks[path][k] = False
    for path in after if case in ("after off", "both off") else ():
        masks[path][k + offset] = False
    for path in after if case == "new off" else ():
        masks[path][new] = False
    if shortcut == 2 and case in ("before off", "both off") and name == "resnet20":
        for path in stages[0]:  # what the first shortcut carries into this channel
            masks[path][k] = False
    if shortcut == 2 and name == "resnet_lambda" and case in ("before off", "both off"):
        assert k < shift(widths[0], widths[1])  # the first shortcut fills it with zeros
    small = checked_shrink(net, model, selection_of(masks))
    expected = [int(alive.sum()) for alive in alive_streams(masks, stages, shift)]
    by_hand = list(widths)
    by_hand[i] -= case in ("before off", "both off")
    by_hand[i + 1] -= case in ("both off", "new off")
    if shortcut == 2 and case in ("before off", "both off") and name == "resnet20":
        by_hand[0] -= 1
    assert expected == by_hand
    assert [at(small, f"layer{j}.1.conv1").in_channels for j in (1, 2, 3)] == by_hand
    assert [at(small, f"layer{j}.0.conv1").in_channels for j in (1, 2, 3)] == [by_hand[0], *by_hand[:2]]
    assert at(small, head).in_features == by_hand[-1]


@pytest.mark.parametrize("keep", [0.6, 0.2])
@pytest.mark.parametrize("name", ["resnet18", "resnet50_imagenet"])
def test_networks_with_projections(name, keep):
    net = zoo.built_in(name)
    model = net.build()
    masks = random_masks(model, keep, 6)
    small = checked_shrink(net, model, selection_of(masks))
    inner, last = ("conv1", "conv2") if name == "resnet18" else ("conv2", "conv3")
    stream = ["conv1"]
    for i in (1, 2, 3, 4):
        blocks = [f"layer{i}.{j}" for j in range(len(at(model, f"layer{i}")))]
        projected = f"layer{i}.0.downsample.0" in masks
        before, stream = stream, [f"layer{i}.0.downsample.0"] if projected else stream
        total = written(masks, [*stream, *(f"{block}.{last}" for block in blocks)])
        for j, block in enumerate(blocks):
            reads = at(small, f"{block}.conv1").in_channels
            if projected and j == 0:
                assert reads == at(small, f"{block}.downsample.0").in_channels == written(masks, before)
            else:
                assert written(masks, stream) <= reads <= total
            assert at(small, f"{block}.conv1").out_channels == int(masks[f"{block}.conv1"].sum())
            assert at(small, f"{block}.{last}").in_channels == int(masks[f"{block}.{inner}"].sum())
            stream = [*stream, f"{block}.{last}"]
    assert small.fc.in_features == written(masks, stream)


@pytest.mark.parametrize("level", ["layer", "filter"])
@pytest.mark.parametrize(
    ("name", "block"),
    [("resnet20", "layer1.1"), ("resnet20", "layer2.0"), ("resnet18", "layer1.0"), ("resnet18", "layer3.1")],
)
def test_an_empty_residual_branch_is_the_identity(name, block, level):
    net = zoo.built_in(name)
    model = net.build()
    parts = {path: layer for path, layer in zoo.writers(model).items() if path.startswith(f"{block}.conv")}
    masks = {path: torch.zeros(1 if level == "layer" else outs(layer)).bool() for path, layer in parts.items()}
    small = checked_shrink(net, model, selection_of(masks, level))
    assert not [m for m in at(small, block).modules() if isinstance(m, (nn.Conv2d, nn.BatchNorm2d))]
    gone = sum(p.numel() for p in at(model, block).parameters())
    assert zoo.parameters(small) == zoo.parameters(model) - gone


@pytest.mark.parametrize("level", ["layer", "filter"])
def test_a_projection_stays_where_its_branch_goes(level):
    net = zoo.built_in("resnet18")
    model = net.build()
    parts = [f"layer2.0.conv{i}" for i in (1, 2)]
    masks = {path: torch.zeros(1 if level == "layer" else outs(at(model, path))).bool() for path in parts}
    small = checked_shrink(net, model, selection_of(masks, level))
    assert len([m for m in small.layer2[0].modules() if isinstance(m, nn.Conv2d)]) == 1


def test_the_last_layer_of_a_branch_alone_empties_it():
    net = zoo.built_in("resnet20")
    model = net.build()
    small = checked_shrink(net, model, selection_of({"layer2.1.conv2": torch.zeros(1).bool()}, "layer"))
    assert not [m for m in small.layer2[1].modules() if isinstance(m, nn.Conv2d)]


def test_a_branch_whose_shift_is_left_is_a_constant():
    # Weights alone: the normalisation after the empty convolution still shifts the stream.
    net = zoo.built_in("resnet20")
    model = net.build()
    masks = {f"layer2.1.conv{i}": torch.zeros(32, 32, 3, 3).bool() for i in (1, 2)}
    checked_shrink(net, model, selection_of(masks, "weight"))


# -- other structures --------------------------------------------------------------------------------------------


def test_depthwise_convolutions_are_as_wide_as_what_they_read():
    net = FOREIGN["mobilenet_v2"]
    model = net.build()
    hidden = {i: torch.arange(width) % 3 > 0 for i, width in ((2, 18), (3, 24), (4, 16))}
    sel = selection_of({f"features.{i}.conv.{j}": mask for i, mask in hidden.items() for j in (0, 3)})
    small = checked_shrink(net, model, sel)
    for i, mask in hidden.items():
        kept = int(mask.sum())
        expand, depthwise, project = (at(small, f"features.{i}.conv.{j}") for j in (0, 3, 6))
        assert expand.out_channels == depthwise.in_channels == depthwise.out_channels == depthwise.groups == kept
        assert project.in_channels == kept
        assert project.out_channels == 8


@pytest.mark.parametrize(
    ("off", "groups", "width"), [((4, 5, 6, 7), 2, 8), ((1, 6, 11), 3, 9), ((0,), None, None), ((0, 1, 4), None, None)]
)
def test_grouped_convolutions(off, groups, width):
    # A whole group, one channel of each, and what no grouped convolution can do without.
    net = FOREIGN["resnext"]
    model = net.build()
    mask = torch.ones(12, dtype=torch.bool)
    mask[list(off)] = False
    small = checked_shrink(net, model, selection_of({"blocks.0.conv1": mask, "blocks.0.conv2": mask}))
    conv = small.blocks[0].conv2
    if width is not None:
        assert (conv.groups, conv.in_channels, conv.out_channels) == (groups, width, width)
        assert small.blocks[0].conv3.in_channels == width


@pytest.mark.parametrize(("name", "up"), [("unet_transposed", "up1.up"), ("unet_nearest", "down2.1.double_conv.3")])
def test_a_concatenation_is_as_wide_as_its_parts(name, up):
    net = FOREIGN[name]
    model = net.build()
    masks = random_masks(model, 0.5, 3)
    small = checked_shrink(net, model, selection_of(masks))
    skip = int(masks["down1.1.double_conv.3"].sum())
    assert at(small, "up1.conv.double_conv.0").in_channels == skip + int(masks[up].sum())
    assert at(small, up).out_channels == int(masks[up].sum())
    assert at(small, "down2.1.double_conv.0").in_channels == skip


def test_inception_branches():
    net = FOREIGN["inception"]
    model = net.build()
    masks = random_masks(model, 0.5, 3)
    small = checked_shrink(net, model, selection_of(masks))
    parts = ("branch1.conv", "branch2.1.conv", "branch3.1.conv", "branch4.1.conv")
    first, second = (sum(int(masks[f"mixed{i}.{part}"].sum()) for part in parts) for i in (1, 2))
    assert at(small, "mixed2.branch1.conv").in_channels == first
    assert at(small, "mixed2.branch4.1.conv").in_channels == first
    assert small.fc.in_features == second


@pytest.mark.parametrize(
    ("name", "inner", "reader"),
    [
        ("densenet", "features.3.denselayer2.conv1", "features.3.denselayer2.conv2"),
        ("resnet_preact", "layers.1.conv1", "layers.1.conv2"),
        ("convnext", "blocks.0.pwconv1", "blocks.0.pwconv2"),
        ("vit_hand", "blocks.0.mlp.0", "blocks.0.mlp.3"),
        ("vit_plain", "blocks.1.mlp.0", "blocks.1.mlp.3"),
        ("vit_mha", "blocks.0.mlp.0", "blocks.0.mlp.3"),
        ("hf_bert", "bert.encoder.layer.0.intermediate.dense", "bert.encoder.layer.0.output.dense"),
        (
            "hf_resnet_basic",
            "resnet.encoder.stages.0.layers.1.layer.0.convolution",
            "resnet.encoder.stages.0.layers.1.layer.1.convolution",
        ),
        ("mobilenet_v3", "se.fc1", "se.fc2"),
    ],
)
def test_inner_layers_of_blocks_are_as_wide_as_their_masks(name, inner, reader):
    net = FOREIGN[name]
    model = net.build()
    masks = random_masks(model, 0.5, 3, net.outputs)
    small = checked_shrink(net, model, selection_of(masks))
    kept = int(masks[inner].sum())
    assert kept < outs(at(model, inner))
    assert (outs(at(small, inner)), ins(at(small, reader))) == (kept, kept)


def test_several_inputs_meet():
    net = FOREIGN["multi_input_output"]
    model = net.build()
    masks = random_masks(model, 0.5, 1, net.outputs)
    small = checked_shrink(net, model, selection_of(masks))
    assert small.joint.in_features == int(masks["image.0"].sum()) + int(masks["vector.0"].sum())
    assert small.map.in_channels == int(masks["image.0"].sum())
    assert small.kind.in_features == small.box.in_features == int(masks["joint"].sum())


@pytest.mark.parametrize("layers", [["fc1"], ["conv1"], ["conv1", "fc1"]])
def test_what_does_not_touch_a_recurrent_layer_goes(layers):
    model = zoo.GRU.build()
    masks = {path: mask for path, mask in random_masks(model, 0.5, 1).items() if path in layers}
    small = checked_shrink(zoo.GRU, model, selection_of(masks))
    for path in layers:
        assert outs(at(small, path)) == int(masks[path].sum())
    assert type(small.gru) is nn.GRU


def test_channels_that_flow_into_a_recurrent_layer_are_refused():
    model = zoo.GRU.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, held = zoo.snapshot(model), [id(p) for p in optimizer.param_groups[0]["params"]]
    mask = torch.arange(8) > 2
    with pytest.raises(ValueError, match=r"\bgru\b") as caught:
        shrink(model, selection_of({"conv2": mask}), zoo.GRU.inputs(2), optimizer)
    assert "\n" not in str(caught.value)
    assert zoo.unchanged(model, before)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == held == [id(p) for p in model.parameters()]
    checked_shrink(zoo.GRU, model, selection_of({"conv2": torch.ones(8).bool()}))


# -- dropped layers of plain networks ----------------------------------------------------------------------------


class Padded(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.channels = channels

    def forward(self, x):
        return F.pad(x, (0, 0, 0, 0, 0, self.channels))


@pytest.mark.parametrize(
    ("layer", "stand_in"),
    [("features.17", nn.Identity()), ("features.10", Padded(2)), ("features.3", Padded(2))],
)
def test_a_dropped_layer_of_a_plain_network_is_a_transition(layer, stand_in):
    widths = (4, 6, 6, 8, 8, 8, 8, 10, 10, 10, 10, 10, 10, 12)
    net = zoo.Net(lambda: create("vgg16", widths=widths), zoo.built_in("vgg16").inputs)
    model = net.build()
    index = int(layer.split(".")[1])
    expected = copy.deepcopy(model)
    conv = expected.features[index]
    assert conv.out_channels - conv.in_channels == getattr(stand_in, "channels", 0)
    expected.features[index], expected.features[index + 1] = stand_in, nn.Identity()
    before = zoo.snapshot(model)
    small = shrink(model, selection_of({layer: torch.zeros(1).bool()}, "layer"), net.inputs(2))
    assert zoo.unchanged(model, before)
    assert difference(evaluate(expected, net.inputs(3)), evaluate(small, net.inputs(3))) <= TOL
    assert zoo.parameters(small) <= zoo.parameters(expected)


def test_several_dropped_layers():
    widths = (4, 4, 6, 6, 8, 8, 8, 10, 10, 10, 10, 10, 10, 12)
    net = zoo.Net(lambda: create("vgg16", widths=widths), zoo.built_in("vgg16").inputs)
    model = net.build()
    expected = copy.deepcopy(model)
    dropped = [27, 30, 34, 37, 40]
    for index in dropped:
        expected.features[index] = expected.features[index + 1] = nn.Identity()
    sel = selection_of({f"features.{index}": torch.zeros(()).bool() for index in dropped}, "layer")
    small = shrink(model, sel, net.inputs(2))
    assert difference(evaluate(expected, net.inputs(3)), evaluate(small, net.inputs(3))) <= TOL
    assert zoo.parameters(small) == zoo.parameters(expected)


@pytest.mark.parametrize(("name", "layer"), [("lenet5", "features.3"), ("alexnet", "features.3")])
def test_a_dropped_layer_that_changes_the_map_leaves_a_network_that_runs(name, layer):
    net = zoo.built_in(name)
    model = net.build()
    small = shrink(model, selection_of({layer: torch.zeros(1).bool()}, "layer"), net.inputs(2))
    result = evaluate(small, net.inputs(3))
    assert result.shape == (3, 10)
    assert result.isfinite().all()
    assert zoo.parameters(small) <= zoo.parameters(model) - sum(p.numel() for p in at(model, layer).parameters())


# -- what comes along --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_mode_statistics_and_frozen_parameters_come_along(training):
    # Looking at a network must not count as a training step: running statistics would move.
    net = zoo.built_in("resnet20")
    model = net.build().train(training)
    model.conv1.weight.requires_grad_(False)
    before = zoo.snapshot(model)
    small = shrink(model, net.selection(model, "filter"), net.inputs(4))
    assert zoo.unchanged(model, before)
    assert model.training is small.training is training
    assert all(module.training is training for network in (model, small) for module in network.modules())
    frozen = [name for name, p in small.named_parameters() if not p.requires_grad]
    assert frozen == ["conv1.weight"]
    assert all(p.grad is None for p in model.parameters())


def test_buffers_are_narrowed_with_their_channels():
    net = zoo.built_in("vgg16")
    model = net.build()
    masks = random_masks(model, 0.5, 1)
    small = shrink(model, selection_of(masks), net.inputs(2))
    mask = masks["features.0"]
    assert torch.equal(small.features[0].weight, model.features[0].weight[mask])
    assert torch.equal(small.features[1].running_var, model.features[1].running_var[mask])
    assert torch.equal(small.features[1].running_mean, model.features[1].running_mean[mask])
    assert torch.equal(small.features[3].weight, model.features[3].weight[masks["features.3"]][:, mask])


def test_double_precision():
    net = zoo.built_in("resnet20")
    model = net.build().double()
    inputs = net.inputs(2).double()
    sel = net.selection(model, "filter")
    with sel.applied(model):
        expected = evaluate(model, inputs)
    small = shrink(model, sel, inputs)
    assert {p.dtype for p in small.parameters()} == {torch.float64}
    assert difference(expected, evaluate(small, inputs)) < 1e-12


@pytest.mark.parametrize(("name", "shape"), [("resnet20", (3, 24, 12)), ("unet_transposed", (1, 16, 11))])
def test_small_networks_take_images_of_other_sizes(name, shape):
    net = FOREIGN[name] if name in FOREIGN else zoo.built_in(name)
    model = net.build()
    sel = net.selection(model, "filter")
    small = shrink(model, sel, net.inputs(2))
    for batch in (1, 5):
        x = torch.randn(batch, *shape)
        with sel.applied(model):
            expected = evaluate(model, x)
        assert difference(expected, evaluate(small, x)) <= TOL


def test_a_batch_of_one_as_example():
    net = zoo.built_in("resnet20")
    model = net.build()
    checked_shrink(net, model, net.selection(model, "filter"), net.inputs(1))
