"""Networks whose own code asks for more than their operators show: surgery gives way to it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dessilbi.selection import Selection
from dessilbi.surgery import profile, shrink
from tests.surgery.zoo import Net, _images, checked_shrink, parameters

OFF = torch.zeros(8, dtype=torch.bool)
IMAGES = _images(3, 6, 6)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.stride = 1

    def forward(self, x, mask=None):
        return x + self.conv(F.relu(x))


class PairBranch(Branch):
    def forward(self, x):
        return x + self.conv(F.relu(x)), 1


class Residual(nn.Module):
    """Two branches; what `use` does with the first is its code's own business."""

    def __init__(self, use, branch=Branch):
        super().__init__()
        self.stem, self.first, self.second, self.head = nn.Conv2d(3, 8, 1), branch(), Branch(), nn.Linear(8, 4)
        self.use = use

    def forward(self, x):
        return self.head(self.second(self.use(self.first, self.stem(x))).mean((2, 3)))


USES = {
    "named_argument": lambda block, x: block(x, mask=None),
    "second_argument": lambda block, x: block(x, None),
    "attribute": lambda block, x: block(x) if block.stride == 1 else x,
    "parameter": lambda block, x: block(x) * (1 + block.conv.weight.sum()),
}


@pytest.mark.parametrize("name", [*USES, "pair"])
def test_a_block_that_the_code_needs_stays(name):
    factory = (
        (lambda: Residual(lambda block, x: block(x)[0], PairBranch)) if name == "pair" else lambda: Residual(USES[name])
    )
    net = Net(factory, IMAGES)
    model = net.build()
    sel = Selection({"first.conv.weight": OFF, "second.conv.weight": OFF}, "filter")
    small = checked_shrink(net, model, sel)
    assert isinstance(small.first, (Branch, PairBranch))
    assert isinstance(small.second, nn.Identity)
    assert profile(model, IMAGES()).parameters_of(sel) == parameters(small)


def test_what_one_selection_taught_does_not_stand_for_the_next():
    """A profile tries every block once, not only those of the first selection it is asked about."""
    model = Net(lambda: Residual(USES["attribute"]), IMAGES).build()
    report = profile(model, IMAGES())
    found = []
    for layer in ("second", "first"):
        sel = Selection({f"{layer}.conv.weight": OFF}, "filter")
        small = checked_shrink(Net(None, IMAGES), model, sel)
        found.append((report.parameters_of(sel), parameters(small)))
    assert all(counted == left for counted, left in found)


class Widened(nn.Module):
    """A shortcut whose new channels are as many as are missing: computed from the size of what is there."""

    def __init__(self, zeros):
        super().__init__()
        self.stem, self.conv, self.head = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 12, 3, padding=1), nn.Linear(12, 4)
        self.zeros = zeros

    def forward(self, x):
        x = F.relu(self.stem(x))
        wide = torch.cat([x, self.zeros(x, x.shape[0], 12 - x.shape[1], *x.shape[2:])], 1)
        return self.head(F.relu(wide + self.conv(x)).mean((2, 3)))


@pytest.mark.parametrize(
    "zeros", [lambda x, *size: x.new_zeros(size), lambda x, *size: torch.zeros(size)], ids=["new_zeros", "zeros"]
)
def test_a_size_that_is_computed_from_what_would_go(zeros):
    net = Net(lambda: Widened(zeros), IMAGES)
    masks = {"stem.weight": torch.arange(6) < 3, "conv.weight": torch.arange(12) % 6 < 3}
    small = checked_shrink(net, net.build(), Selection(masks, "filter"))
    assert small.stem.out_channels == 6


def test_channels_of_zeros_go_with_those_they_are_added_to():
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.conv, self.head = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 12, 3, padding=1), nn.Linear(12, 4)

        def forward(self, x):
            x = F.relu(self.stem(x))
            return self.head(F.relu(torch.cat([x, torch.zeros_like(x)], 1) + self.conv(x)).mean((2, 3)))

    net = Net(Doubled, IMAGES)
    masks = {"stem.weight": torch.arange(6) < 3, "conv.weight": torch.arange(12) % 6 < 3}
    small = checked_shrink(net, net.build(), Selection(masks, "filter"))
    assert (small.stem.out_channels, small.conv.out_channels, small.head.in_features) == (3, 6, 6)


@pytest.mark.parametrize("groups", [4, 12])
def test_group_normalisation_without_parameters(groups):
    """There is no weight that would say how many channels are left: the number of groups is the module's own."""

    def factory():
        return nn.Sequential(
            nn.Conv2d(3, 12, 1, bias=False), nn.GroupNorm(groups, 12, affine=False), nn.ReLU(), nn.Conv2d(12, 4, 3)
        )

    net = Net(factory, IMAGES)
    small = checked_shrink(net, net.build(), Selection({"0.weight": torch.arange(12) >= 6}))
    assert (small[0].out_channels, small[1].num_groups, small[1].num_channels) == (6, groups // 2, 6)


# -- level "layer" -----------------------------------------------------------------------------------------------


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(8, 3, 3, 3)), nn.Parameter(torch.rand(8))
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("var", torch.rand(8) + 0.5)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = F.conv2d(x, self.weight)
        return self.last(F.relu(F.batch_norm(x, self.mean, self.var, self.scale)))


class Attended(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.attention = nn.Linear(6, 12), nn.MultiheadAttention(12, 3, batch_first=True)
        self.last = nn.Linear(12, 4)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.attention(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize(
    ("net", "name"),
    [
        (Net(Functional, IMAGES), "weight"),
        (Net(Attended, _images(5, 6)), "attention.out_proj.weight"),
        (Net(Attended, _images(5, 6)), "attention.in_proj_weight"),
    ],
    ids=["functional", "out_proj", "in_proj"],
)
@pytest.mark.filterwarnings("ignore:nothing of layer")
def test_a_weight_that_is_no_layers_own_is_masked_not_left_out(net, name):
    model = net.build()
    checked_shrink(net, model, Selection({name: torch.zeros(1, dtype=torch.bool)}, "layer"))


class AsksItsLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(F.relu(self.second(F.relu(self.first(x.to(self.first.weight.dtype))))))


def test_a_layer_that_the_code_asks_stays():
    net = Net(AsksItsLayer, IMAGES)
    model = net.build()
    off = torch.zeros(1, dtype=torch.bool)
    with pytest.warns(UserWarning, match="the network's code needs layer 'first': it stays"):
        checked_shrink(net, model, Selection({"first.weight": off}, "layer"))
    with pytest.warns(UserWarning, match="needs layer 'first'"):
        small = shrink(model, Selection({"first.weight": off, "second.weight": off}, "layer"), IMAGES())
    assert isinstance(small.second, nn.Identity)
    assert small(IMAGES(3)).shape == (3, 4, 6, 6)


class FunctionalNorm(nn.Module):
    """The normalisation behind the layer is a call in the network's own code: it cannot be put aside, and stays."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("var", torch.rand(8) + 0.5)

    def forward(self, x):
        x = self.second(F.relu(self.first(x)))
        return self.last(F.relu(F.batch_norm(x, self.mean, self.var, self.scale)))


def test_a_normalisation_in_the_networks_own_code_stays_behind_a_layer_left_out():
    model = Net(FunctionalNorm, IMAGES).build()
    small = shrink(model, Selection({"second.weight": torch.zeros(1, dtype=torch.bool)}, "layer"), IMAGES())
    x = IMAGES(3)
    with torch.no_grad():
        y = F.batch_norm(F.relu(model.first(x)), model.mean, model.var, model.scale)
        torch.testing.assert_close(small(x), model.last(F.relu(y)))
    assert isinstance(small.second, nn.Identity)
