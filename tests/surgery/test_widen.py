"""A wider network computes what the network computed, and everything that was there is there still.

Where the old entries went is read off the optimizer: its momentum is set to 1, 2, 3, … beforehand, and what is not zero
afterwards says which entry it was.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from dessilbi.models import create, names
from dessilbi.surgery import profile, widen
from dessilbi.surgery.widening import Widening
from tests.surgery import zoo
from tests.surgery.test_equality import is_consistent
from tests.surgery.zoo import FOREIGN, difference, evaluate, snapshot, unchanged

TOL = 1e-6
# Where sizes are written into the code that new channels would flow through, and cannot follow.
RIGID = {
    "autoencoder": ["expand"],
    "shufflenet_v2": ["stem.0", "stage.0.branch.5", "stage.1.branch.5"],
    "shufflenet_v1": ["gconv1"],
    "unequal_split": ["conv1"],
    "vit_hand": ["blocks.0.attn.qkv", "blocks.1.attn.qkv"],
    "vit_plain": ["blocks.0.attn.q", "blocks.1.attn.q"],
}
ONES = ("weight", "running_var")


def net_of(name):
    return FOREIGN[name] if name in FOREIGN else zoo.built_in(name)


def everything(net, model, name, times=1):
    """All streams that can grow, by as little as they can, times `times`."""
    widening = Widening(model, net.inputs(2))
    return {
        stream[0]: times * widening.multiple(stream[0])
        for stream in widening.streams
        if stream[0] not in RIGID.get(name, ())
    }


def numbered(model):
    """An optimizer whose momentum numbers the entries of every parameter, from 1."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.arange(1.0, p.numel() + 1, dtype=torch.float64).view(p.shape)
    return optimizer


def places(optimizer, wide, old):
    """For every parameter of `old` that has another shape now: along each axis, where the old entries are."""
    found = {}
    shapes = {name: p.shape for name, p in old.named_parameters()}
    for name, p in wide.named_parameters():
        if p.shape == shapes[name]:
            continue
        number = optimizer.state[p]["momentum_buffer"]
        assert number.shape == p.shape
        there = number.nonzero()
        index = [there[:, d].unique() for d in range(p.ndim)]
        assert [len(i) for i in index] == list(shapes[name]), name
        expected = torch.arange(1, math.prod(shapes[name]) + 1).view(shapes[name])
        assert torch.equal(number[torch.meshgrid(*index, indexing="ij")].long(), expected), name
        found[name] = index
    return found


def still(model):
    """In training mode, but for what draws random numbers."""
    model = copy.deepcopy(model).train()
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def checked_widen(net, model, extra, optimizer=None, tol=TOL, **options):
    """`widen`, with the same outputs in both modes; the original stays as it is."""
    before = snapshot(model)
    wide = widen(model, extra, net.inputs(2), optimizer, **options)
    assert unchanged(model, before)
    assert not {p.data_ptr() for p in wide.parameters()} & {p.data_ptr() for p in model.parameters()}
    assert is_consistent(wide)
    x = net.inputs(3)
    assert difference(evaluate(model, x), evaluate(wide, x)) <= tol
    assert difference(zoo.call(still(model), x), zoo.call(still(wide), x)) <= tol
    return wide


# -- everywhere --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*names(), *(name for name in FOREIGN if name != "tied_weights")])
def test_outputs_stay_and_what_was_there_stays(name):
    net = net_of(name)
    model = net.build()
    extra = everything(net, model, name)
    assert extra
    optimizer = numbered(model)
    wide = checked_widen(net, model, extra, optimizer)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in wide.parameters()]
    index = places(optimizer, wide, model)
    assert index
    old = dict(model.named_parameters())
    modules = dict(wide.named_modules())
    for path, p in wide.named_parameters():
        if path not in index:
            assert torch.equal(p, old[path])
            continue
        grid = torch.meshgrid(*index[path], indexing="ij")
        assert torch.equal(p[grid], old[path])
        new = torch.ones(p.shape, dtype=torch.bool)
        new[grid] = False
        module = modules.get(path.rpartition(".")[0])
        if p.ndim == 1:
            kind = path.rpartition(".")[2]
            norm = isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm))
            expected = 0.25 if isinstance(module, nn.PReLU) else float(norm and kind in ONES)
            assert (p[new] == expected).all(), path
        elif isinstance(module, zoo.WRITERS):
            rows = 1 if isinstance(module, nn.modules.conv._ConvTransposeNd) else 0
            filters = torch.ones(p.shape[rows], dtype=torch.bool)
            filters[index[path][rows]] = False
            its = torch.zeros_like(new)
            its.movedim(rows, 0)[filters] = True
            assert (p[new & ~its] == 0).all(), path
            assert (p[its] != 0).all(), path
    for path, module in wide.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            was = model.get_submodule(path)
            mean, var = module.running_mean, module.running_var
            there = index[f"{path}.weight"][0] if f"{path}.weight" in index else (mean != 0).nonzero().flatten()
            new = torch.ones(len(mean), dtype=torch.bool)
            new[there] = False
            assert torch.equal(mean[there], was.running_mean)
            assert torch.equal(var[there], was.running_var)
            assert (mean[new] == 0).all()
            assert (var[new] == 1).all()


@pytest.mark.parametrize("name", RIGID)
def test_sizes_written_into_the_code_are_a_refusal(name):
    net = net_of(name)
    model = net.build()
    optimizer = numbered(model)
    before, state = snapshot(model), copy.deepcopy(optimizer.state_dict())
    widening = Widening(model, net.inputs(2))
    for path in RIGID[name]:
        with pytest.raises(ValueError, match="sizes are written into the code of"):
            widening.apply({path: widening.multiple(path)}, optimizer)
    assert unchanged(model, before)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert all(
        torch.equal(a["momentum_buffer"], b["momentum_buffer"])
        for a, b in zip(state["state"].values(), optimizer.state_dict()["state"].values(), strict=True)
    )


# -- where things go, by hand ------------------------------------------------------------------------------------


def sized(net, model, extra):
    """The wider network, and for each parameter that changed its places."""
    optimizer = numbered(model)
    wide = checked_widen(net, model, extra, optimizer)
    return wide, places(optimizer, wide, model)


def new(index, size):
    """The positions along an axis that are no old entry's."""
    return sorted(set(range(size)) - set(index.tolist()))


def test_vgg16_at_its_real_widths():
    net = zoo.Net(lambda: create("vgg16", widths=[8] * 13 + [512]), zoo.built_in("vgg16").inputs)
    model = net.build()
    wide = checked_widen(net, model, {"features.3": 8, "features.24": 3, "features.40": 5, "classifier.0": 7})
    widths = [8, 16, 8, 8, 8, 8, 8, 11, 8, 8, 8, 8, 13]
    assert [m.out_channels for m in wide.modules() if isinstance(m, nn.Conv2d)] == widths
    befores = [3, *widths[:12]]
    expected = sum(9 * i * o + 2 * o for i, o in zip(befores, widths, strict=True)) + 14 * 519 + 520 * 10
    assert zoo.parameters(wide) == expected
    assert Widening(model, net.inputs(1)).parameters({"features.3": 8, "features.24": 3, "features.40": 5,
                                                      "classifier.0": 7}) == expected  # fmt: skip


def test_a_residual_stream_grows_as_a_whole_and_hands_on_to_those_behind():
    # Option A carries the channels of the first stream to the second and on to the third.
    net = zoo.Net(lambda: create("resnet20", widths=[4, 6, 10]), zoo.built_in("resnet20").inputs)
    model = net.build()
    wide, index = sized(net, model, {"layer1.1.conv2": 3})
    streams = {"conv1": (4, 7), "layer1": (4, 7), "layer2": (6, 9), "layer3": (10, 13)}
    for path, conv in wide.named_modules():
        if not isinstance(conv, nn.Conv2d):
            continue
        was, now = streams[path.split(".")[0]]
        inner = path.endswith(".conv1") and "." in path
        assert conv.out_channels == (was if inner else now)
        if not inner:
            assert new(index[f"{path}.weight"][0], now) == [now - 3, now - 2, now - 1] if was == 4 else True
    # Of the second stream's channels the first four are carried; the new ones of the first come right behind them.
    assert new(index["layer2.0.conv2.weight"][0], 9) == [4, 5, 6]
    assert new(index["layer3.0.conv2.weight"][0], 13) == [4, 5, 6]
    assert new(index["fc.weight"][1], 13) == [4, 5, 6]
    # One alone in the middle has only to take along what comes after it.
    wide = checked_widen(net, model, {"layer2.2.conv2": 2})
    assert (wide.conv1.out_channels, wide.layer2[0].conv2.out_channels, wide.fc.in_features) == (4, 8, 12)
    # Streams of one width are streams of their own, too: what pads by nothing can pad.
    equal = zoo.Net(lambda: create("resnet20", widths=[4, 4, 4]), zoo.built_in("resnet20").inputs)
    wide = checked_widen(equal, equal.build(), {"layer2.1.conv2": 3})
    assert (wide.conv1.out_channels, wide.layer2[0].conv2.out_channels, wide.fc.in_features) == (4, 7, 7)
    # Streams behind that are asked for as much need nothing more; asked for more, they get the rest of their own.
    wide = checked_widen(net, model, {"conv1": 2, "layer2.0.conv2": 2, "layer3.0.conv2": 5})
    assert (wide.conv1.out_channels, wide.layer2[0].conv2.out_channels, wide.fc.in_features) == (6, 8, 15)
    # Of several amounts for one stream the largest counts.
    wide = checked_widen(net, model, {"conv1": 1, "layer1.0.conv2": 3})
    assert wide.conv1.out_channels == 7


def test_behind_a_concatenation_the_new_channel_is_where_its_layer_is():
    net = FOREIGN["densenet"]
    wide, index = sized(net, net.build(), {"features.3.denselayer1.conv2": 1})
    # [8 of the stem | 4 of the first layer | 4 of the second]: the thirteenth is the new one.
    assert new(index["features.3.denselayer2.norm1.weight"][0], 13) == [12]
    assert new(index["features.3.denselayer2.conv1.weight"][1], 13) == [12]
    assert new(index["features.4.0.weight"][0], 17) == [12]
    assert new(index["features.4.2.weight"][1], 17) == [12]
    assert wide.features[4][2].out_channels == 8
    net = FOREIGN["inception"]
    wide, index = sized(net, net.build(), {"mixed1.branch2.1.conv": 2, "mixed1.branch4.1.conv": 1})
    # [4 | 8 | 6 | 5] becomes [4 | 8, 2 | 6 | 5, 1], and the four branches behind it and the pool read that.
    for path in ("branch1.conv", "branch2.0.conv", "branch3.0.conv", "branch4.1.conv"):
        assert new(index[f"mixed2.{path}.weight"][1], 26) == [12, 13, 25]
    assert sorted(wide.state_dict()) == sorted(net.build().state_dict())


def test_a_skip_connection_of_a_u_net():
    net = FOREIGN["unet_transposed"]
    _, index = sized(net, net.build(), {"down1.1.double_conv.3": 2, "up1.up": 3})
    # [8 from down1 | 8 from up1.up]
    assert new(index["up1.conv.double_conv.0.weight"][1], 21) == [8, 9, 18, 19, 20]
    assert new(index["down2.1.double_conv.0.weight"][1], 10) == [8, 9]
    assert new(index["up1.up.weight"][1], 11) == [8, 9, 10]


def test_a_flattened_channel_is_as_many_inputs_as_it_has_pixels():
    net = FOREIGN["vgg_flat"]
    wide, index = sized(net, net.build(), {"features.7": 2})
    assert wide.classifier[0].in_features == 10 * 6
    assert new(index["classifier.0.weight"][1], 60) == list(range(48, 60))


def test_depthwise_convolutions_get_more_groups_and_grouped_ones_wider_groups():
    net = FOREIGN["mobilenet_v2"]
    wide, _ = sized(net, net.build(), {"features.2.conv.0": 5})
    depthwise = wide.features[2].conv[3]
    assert (depthwise.groups, depthwise.in_channels, depthwise.out_channels) == (23, 23, 23)
    net = FOREIGN["resnext"]
    wide, index = sized(net, net.build(), {"blocks.0.conv2": 6})
    grouped = wide.blocks[0].conv2
    assert (grouped.groups, grouped.in_channels, grouped.out_channels) == (3, 12, 18)
    # Four outputs a group were there: two more come in behind each four.
    assert new(index["blocks.0.conv2.weight"][0], 18) == [4, 5, 10, 11, 16, 17]
    assert new(index["blocks.0.conv3.weight"][1], 18) == [4, 5, 10, 11, 16, 17]


def test_layers_that_share_a_module():
    net = FOREIGN["tied"]
    wide, index = sized(net, net.build(), {"stem": 2})
    assert wide.shared.weight.shape[:2] == (10, 10)
    assert new(index["shared.weight"][0], 10) == new(index["shared.weight"][1], 10) == [8, 9]


# -- layers with a single filter ---------------------------------------------------------------------------------


def test_from_a_single_filter_to_more() -> None:
    net = zoo.Net(lambda: create("lenet5", widths=[1, 1, 2, 1]), zoo.built_in("lenet5").inputs)
    model = net.build()
    widening = Widening(model, net.inputs(2))
    assert widening.streams == [["features.0"], ["features.3"], ["features.6"], ["classifier.0"]]
    extra = {"features.0": 3, "features.3": 1, "features.6": 2, "classifier.0": 4}
    assert [widening.multiple(path) for path in extra] == [1] * 4
    wide, index = sized(net, model, extra)
    assert list(Widening(wide, net.inputs(2)).widths.values()) == [4, 2, 4, 5, 10]
    assert zoo.parameters(wide) == 26 * 4 + 101 * 2 + 51 * 4 + 5 * 5 + 60 == widening.parameters(extra)
    assert widening.macs(extra) == profile(wide, net.inputs(2)).macs
    for path, p in wide.named_parameters():
        old = dict(model.named_parameters())[path]
        there = p[torch.meshgrid(*index[path], indexing="ij")] if path in index else p
        assert torch.equal(there, old)
    assert (wide.features[3].weight[0, 1:] == 0).all()
    assert (wide.features[0].weight[1:].flatten(1).norm(dim=1) > 0).all()
    for init in ("split", "random"):
        assert widen(model, extra, net.inputs(2), init=init).classifier[0].weight.shape == (5, 4)
    checked_widen(net, model, {"features.0": 2}, tol=2e-6, init="split")


def test_a_single_filter_of_a_flattened_map_or_a_concatenation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 1, 3), nn.BatchNorm2d(1), nn.ReLU(), nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3)
    )
    net = zoo.Net(lambda: zoo.randomise(model, 0), zoo._images(2, 5, 6))
    wide, index = sized(net, net.build(), {"0": 2})
    assert new(index["4.weight"][1], 36) == list(range(12, 36))
    assert (wide[1].running_var[1:] == 1).all()
    net = zoo.Net(Branches, zoo._images(2, 5, 6))
    _, index = sized(net, net.build(), {"b": 1})
    assert new(index["out.weight"][1], 6) == [3]  # [2 | 1, 1 | 2]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(2, n, 1) for n in (2, 1, 2))
        self.out = nn.Conv2d(5, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.a(x), self.b(x), self.c(x)], 1).relu())


def test_single_channels_that_have_to_stay() -> None:
    one = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"'2': it has a single channel, which is an output.*begin with two"):
        widen(one, {"2": 1}, torch.randn(2, 4))
    stream = create("resnet20", widths=[1, 1, 1])
    optimizer = numbered(stream)
    before = snapshot(stream)
    with pytest.raises(ValueError, match="'conv1': it has a single channel"):
        widen(stream, {"layer1.0.conv1": 1, "conv1": 1}, torch.randn(1, 3, 16, 16), optimizer)
    assert unchanged(stream, before)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in stream.parameters()]
    # What is refused of the rest is refused before the single ones have changed.
    model = Halves()
    optimizer = numbered(model)
    for rest, count, words in (("out", 1, "are outputs"), ("b", 1, "in steps of 2"), ("b", 2, "sizes are written")):
        with pytest.raises(ValueError, match=words):
            widen(model, {"a": 1, rest: count}, torch.randn(1, 2, 5, 6), optimizer)
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert widen(model, {"a": 1}, torch.randn(1, 2, 5, 6), optimizer).a.out_channels == 2


class Halves(nn.Module):
    """Its second layer must have four filters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Conv2d(2, 1, 1), nn.Conv2d(1, 4, 1), nn.Conv2d(2, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = torch.split(self.b(self.a(x).relu()).relu(), [2, 2], 1)
        return self.out(one - other)


# -- what new filters start from ---------------------------------------------------------------------------------


def two_convolutions(bias=True):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 5, 3, padding=1, bias=bias), nn.ReLU(), nn.Conv2d(5, 4, 3, padding=1, bias=bias))


def three_convolutions():
    return nn.Sequential(*two_convolutions(), nn.ReLU(), nn.Conv2d(4, 2, 1))


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("layer", "fan_in"), [("0", 27), ("2", 45)])
def test_new_filters_are_drawn_as_he_et_al_do(layer, fan_in):
    model = three_convolutions()
    count = 2000
    wide = widen(model, {layer: count}, X, generator=torch.Generator().manual_seed(0))
    drawn = wide.get_submodule(layer).weight.detach()[-count:].double()
    n = drawn.numel()
    var = 2 / fan_in
    # Four standard deviations of the mean, of the variance and of the fourth moment of n normal numbers.
    assert abs(float(drawn.mean())) < 4 * math.sqrt(var / n)
    assert abs(float(drawn.var()) / var - 1) < 4 * math.sqrt(2 / n)
    assert abs(float((drawn**4).mean()) / (3 * var**2) - 1) < 4 * math.sqrt(96 / 9 / n)
    assert (wide.get_submodule(layer).bias[-count:] == 0).all()


def test_the_number_of_inputs_is_that_of_the_wider_layer():
    # Five inputs were there and 1995 come in: 2000 times 9 are what the variance goes by.
    wide = widen(three_convolutions(), {"0": 1995, "2": 50}, X, generator=torch.Generator().manual_seed(0))
    drawn = wide[2].weight.detach()[-50:].double()
    assert abs(float(drawn.var()) * 2000 * 9 / 2 - 1) < 4 * math.sqrt(2 / drawn.numel())


def test_the_same_generator_gives_the_same_filters():
    model = two_convolutions()
    one, same, other = (
        widen(model, {"0": 3}, X, generator=torch.Generator().manual_seed(seed))[0].weight for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    torch.manual_seed(5)
    one = widen(model, {"0": 3}, X)[0].weight
    torch.manual_seed(5)
    assert torch.equal(widen(model, {"0": 3}, X)[0].weight, one)


def test_small_random_outgoing_weights():
    model = two_convolutions()
    wide = widen(model, {"0": 2000}, X, init="random", generator=torch.Generator().manual_seed(0))
    outgoing = wide[2].weight.detach()[:, 5:].double()
    # A tenth of He's standard deviation for 2005 inputs of nine pixels.
    std = 0.1 * math.sqrt(2 / (2005 * 9))
    assert abs(float(outgoing.std()) / std - 1) < 4 * math.sqrt(1 / (2 * outgoing.numel()))
    assert torch.equal(wide[2].weight[:, :5], model[2].weight)
    few = widen(model, {"0": 2}, X, init="random", generator=torch.Generator().manual_seed(0))
    assert difference(evaluate(model, X), evaluate(few, X)) > 1e-3


SPLIT = ["vgg16", "lenet5", "resnet20", "mlp", "vgg_flat", "autoencoder", "resnext", "shufflenet_v1", "mobilenet_v2",
         "densenet", "inception", "unet_nearest", "hf_resnet_bottleneck", "vit_hand", "tied", "conv1d"]  # fmt: skip


@pytest.mark.parametrize("name", SPLIT)
def test_splitting_keeps_the_outputs(name):
    # In double precision: halves and perturbations round otherwise.
    single = net_of(name)
    net = zoo.Net(single.factory, lambda batch=2: single.inputs(batch).double())
    model = single.build().double()
    optimizer = numbered(model)
    extra = everything(net, model, name, 2)
    wide = checked_widen(net, model, extra, optimizer, tol=1e-12, init="split")
    # Every old entry has kept its momentum, the new ones have none.
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        momentum = optimizer.state[q]["momentum_buffer"]
        assert torch.equal(momentum[momentum != 0].sort()[0], torch.arange(1.0, p.numel() + 1, dtype=torch.float64))


def test_a_split_filter_is_copied_and_its_readers_share_it_unequally():
    model = two_convolutions()
    optimizer = numbered(model)
    wide = widen(model, {"0": 2}, X, optimizer, init="split", generator=torch.Generator().manual_seed(4))
    index = places(optimizer, wide, model)["0.weight"][0].tolist()
    copies = new(torch.tensor(index), 7)
    filters, readers = wide[0].weight.detach(), wide[2].weight.detach()
    parents = []
    for i in copies:
        parent = next(j for j in index if torch.equal(filters[j], filters[i]))
        assert wide[0].bias[i] == wide[0].bias[parent]
        parents.append(parent)
        old = model[2].weight.detach()[:, index.index(parent)]
        torch.testing.assert_close(readers[:, i] + readers[:, parent], old, rtol=0, atol=1e-7)
        apart = (readers[:, i] - readers[:, parent]) / 2
        # Plus and minus a tenth of He's standard deviation for the seven inputs.
        assert 0.5 < float(apart.std()) / (0.1 * math.sqrt(2 / 63)) < 2
    assert len(set(parents)) == 2
    for i in index:
        if i not in parents:
            assert torch.equal(readers[:, i], model[2].weight.detach()[:, index.index(i)])
    # The two halves move apart from here: without the perturbation their gradients would be equal.
    functional.mse_loss(wide(X), torch.zeros(2, 4, 6, 6)).backward()
    assert not torch.allclose(wide[0].weight.grad[copies[0]], wide[0].weight.grad[parents[0]])
