"""Normalisations that do not stand beside the convolution whose channels they normalise."""

import torch
from torch import nn

from dessilbi import Selection, complete, shrink
from tests.surgery import zoo


class BehindConcatenation(nn.Module):
    """As in a DenseNet: one normalisation for the channels of two convolutions."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Conv2d(3, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(9)
        self.last = nn.Conv2d(9, 2, 1)

    def forward(self, x):
        return self.last(torch.relu(self.norm(torch.cat([self.a(x), self.b(x)], 1))))


def test_the_channels_of_a_normalisation_behind_a_concatenation():
    model = zoo.randomise(BehindConcatenation(), 0).eval()
    x = torch.randn(2, 3, 6, 6)
    keep_a, keep_b = torch.tensor([1, 0, 1, 1]).bool(), torch.tensor([0, 1, 1, 1, 0]).bool()
    sel = Selection({"a.weight": keep_a, "b.weight": keep_b})
    assert shrink(model, sel, x).last.in_channels == 9  # a constant is not nothing
    whole = complete(model, sel, x)
    expected = torch.cat([keep_a, keep_b])
    assert {name: mask.tolist() for name, mask in whole.along.items()} == {
        "norm.weight": expected.tolist(), "norm.bias": expected.tolist()
    }  # fmt: skip
    assert (whole.keep, list(whole)) == (sel.keep, list(sel))
    # By hand: the same network with the channels taken out of every tensor.
    small = BehindConcatenation()
    small.a, small.b, small.norm = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(6)
    small.last = nn.Conv2d(6, 2, 1)
    for part, index in (("a", keep_a), ("b", keep_b), ("norm", expected)):
        for name, t in {
            **dict(getattr(small, part).named_parameters()),
            **dict(getattr(small, part).named_buffers()),
        }.items():
            if t.ndim:
                t.data.copy_(getattr(getattr(model, part), name)[index])
    small.last.weight.data.copy_(model.last.weight[:, expected])
    small.last.bias.data.copy_(model.last.bias)
    small.eval()
    found = shrink(model, whole, x)
    assert [tuple(p.shape) for p in found.parameters()] == [tuple(p.shape) for p in small.parameters()]
    with torch.no_grad(), whole.applied(model):
        torch.testing.assert_close(found(x), small(x))
        torch.testing.assert_close(model(x), small(x))


def test_densenet_loses_the_channels_that_its_layers_add(tmp_path):
    net = zoo.FOREIGN["densenet"]
    model = net.build()
    sel = net.selection(model, "filter")
    whole = complete(model, sel, net.inputs())
    whole.save(tmp_path / "sel")
    whole = Selection.load(tmp_path / "sel")
    assert whole.along
    plain, small = shrink(model, sel, net.inputs()), shrink(model, whole, net.inputs())
    assert zoo.parameters(small) < zoo.parameters(plain) < zoo.parameters(model)
    with torch.no_grad(), whole.applied(model):
        assert zoo.outputs_close(model(net.inputs()), small(net.inputs()))


def test_nothing_is_added_where_everything_is_found_already():
    net = zoo.built_in("vgg16")
    model = net.build()
    sel = net.selection(model, "filter")
    assert not complete(model, sel, net.inputs()).along
    weights = net.selection(model, "weight")
    assert complete(model, weights, net.inputs()) is weights


def test_behind_a_plain_layer_that_is_left_out_nothing_is_silent():
    # What masking would make dead is not: its place is taken by what joins the ends.
    net = zoo.built_in("vgg16")
    model = net.build()
    convolutions = [name for name, p in model.named_parameters() if p.ndim == 4]
    sel = Selection({name: torch.tensor([i not in (3, 8)]) for i, name in enumerate(convolutions)}, "layer")
    assert not complete(model, sel, net.inputs()).along


def test_where_a_part_of_a_branch_is_left_out_all_of_it_is_silent():
    net = zoo.built_in("resnet20")
    model = net.build()
    sel = Selection({"layer2.1.conv1.weight": torch.tensor([False])}, "layer")
    whole = complete(model, sel, net.inputs())
    assert {name: bool(mask.any()) for name, mask in whole.along.items()} == {
        "layer2.1.bn2.weight": False, "layer2.1.bn2.bias": False
    }  # fmt: skip
    small = shrink(model, whole, net.inputs())
    gone = sum(p.numel() for p in model.layer2[1].parameters())
    assert zoo.parameters(small) == zoo.parameters(model) - gone
