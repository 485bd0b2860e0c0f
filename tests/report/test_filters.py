"""Filters as images: where a closed form is known, and what a sheet shows of a run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from dessilbi import Path as SolutionPath
from dessilbi.report.excitation import excite, respond
from dessilbi.report.filters import sheet
from dessilbi.training.run import Run


class Inplace(nn.Module):
    """ReLUs in the three ways that networks write them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(*shape) for shape in ((6, 8), (8, 7), (7, 4)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x), inplace=True)
        out: Tensor = self.third(torch.relu_(self.second(x)))
        return out


# -- activation maximisation -----------------------------------------------------------------------------------------


def test_what_excites_a_linear_filter_most_is_the_filter() -> None:
    """Of all x with ‖x‖ = √n, w·x is largest at x = √n·w/‖w‖ (Cauchy-Schwarz)."""
    net = nn.Sequential(nn.Conv2d(3, 5, 4))
    found = excite(net, net[0], [4, 1], (3, 4, 4))
    weights = net[0].weight.detach()[[4, 1]]
    expected = weights * (48**0.5 / weights.flatten(1).norm(dim=1).view(-1, 1, 1, 1))
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=0)


def test_it_is_the_position_in_the_middle_that_is_excited() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, bias=False))
    (found,) = excite(net, net[0], [1], (1, 9, 9))
    kernel = net[0].weight.detach()[1]
    assert found[:, 3:6, 3:6].norm() == pytest.approx(9.0, rel=1e-3)  # all of the norm √81 is there
    torch.testing.assert_close(found[:, 3:6, 3:6], kernel * 9 / kernel.norm(), atol=2e-2, rtol=0)


def test_a_filter_behind_a_relu_is_excited_more_than_by_noise() -> None:
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    images = excite(net, net[2], range(4), (1, 9, 9))
    middle = net(images)[range(4), range(4), 2, 2]
    noise = torch.randn(200, 1, 9, 9)
    noise *= 9 / noise.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
    assert (middle > net(noise)[:, :, 2, 2].max(0).values).all()


def test_what_nothing_excites_is_an_empty_image() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3))
    nn.init.zeros_(net[0].weight[0])
    dead, live = excite(net, net[0], [0, 1], (1, 3, 3))
    assert not dead.any()
    assert live.norm() == pytest.approx(3)


# -- guided backpropagation ------------------------------------------------------------------------------------------


def test_guided_backpropagation_by_hand() -> None:
    net = Inplace()
    x = torch.randn(6)
    first, second, third = (layer.weight.detach().double().numpy() for layer in (net.first, net.second, net.third))
    b1, b2 = (layer.bias.detach().double().numpy() for layer in (net.first, net.second))
    h1 = first @ x.double().numpy() + b1
    h2 = second @ np.maximum(h1, 0) + b2
    expected = []
    for k in (2, 0):
        back = third[k]
        back = np.maximum(back, 0) * (h2 > 0)
        back = np.maximum(second.T @ back, 0) * (h1 > 0)
        expected.append(first.T @ back)
    found = respond(net, net.third, [2, 0], x)
    np.testing.assert_allclose(found.numpy(), np.stack(expected), atol=1e-6)
    # The plain gradient is another one: the test would see if nothing were guided.
    plain = torch.func.jacrev(net)(x)[[2, 0]]
    assert not np.allclose(plain.detach().numpy(), np.stack(expected), atol=1e-3)


def test_the_network_is_left_as_it_was() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).train()
    net[1].eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    excite(net, net[4], [0], (1, 4, 4))
    respond(net, net[4], [0], torch.randn(1, 4, 4))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert [m.training for m in net] == [True, False, True, True, True]
    assert all(p.grad is None for p in net.parameters())
    assert not any(m._forward_hooks for m in net.modules())


def test_a_layer_that_images_do_not_reach_is_named() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3))
    with pytest.raises(ValueError, match="Linear: images do not pass through this layer"):
        excite(net, nn.Linear(2, 2), [0], (1, 4, 4))


# -- sheets ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(run: Run) -> SolutionPath:
    return SolutionPath.load(run.path_file)


def ranked(path: SolutionPath, name: str) -> tuple[list[int], np.ndarray]:
    """The groups in the order of their first entry, then of ‖V‖; and the support at every point."""
    supports = torch.stack([path.support(name, k) for k in range(len(path))]).numpy()
    first = [int(column.argmax()) if column.any() else len(path) for column in supports.T]
    last = path.norms(name).v[-1].numpy()
    return sorted(range(len(first)), key=lambda g: (first[g], -last[g])), supports


def test_kernels_come_in_the_order_in_which_they_entered(run: Run, path: SolutionPath) -> None:
    (kernels, *_) = sheet(run, "0").blocks
    assert kernels.title == "Kernels"
    (row,) = kernels.rows
    order, supports = ranked(path, "0.weight")
    state = run.at_epoch(4)["model"]["0.weight"]
    assert len(row.tiles) == 6
    for tile, g in zip(row.tiles, order, strict=True):
        assert torch.equal(tile.values, state[g])
        assert tile.selected == bool(supports[-1, g])
        assert tile.label.startswith(f"filter {g}, ")


def test_a_sheet_has_a_row_an_epoch_and_the_weights_of_that_epoch(run: Run, path: SolutionPath) -> None:
    made = sheet(run, "0", epochs=[4, 2], count=2)
    excited = made.blocks[1]
    assert [row.label for row in excited.rows] == ["epoch 2", "epoch 4"]
    support = path.support("0.weight")
    selected = [int(h.split()[1]) for h in excited.headings[: min(2, int(support.sum()))]]
    assert support[selected].all()
    numbers = [int(h.split()[1]) for h in excited.headings]
    assert len(numbers) == len(set(numbers)) == min(2, int(support.sum())) + min(2, int((~support).sum()))
    # Of the others those that would enter last.
    others = [g for g in ranked(path, "0.weight")[0] if not support[g]]
    assert numbers[len(selected) :] == others[::-1][:2]
    at = {p["point"]: k for k, p in enumerate(path.points)}
    for row, epoch in zip(excited.rows, (2, 4), strict=True):
        weights = run.at_epoch(epoch)["model"]["0.weight"]
        for g, tile in zip(numbers, row.tiles, strict=True):
            assert tile.selected == bool(path.support("0.weight", at[epoch])[g])
            # The first convolution has stride 2 and no padding: the middle of 3 positions looks at pixels 2 to 4.
            patch = tile.values[:, 2:5, 2:5]
            assert F.cosine_similarity(patch.flatten(), weights[g].flatten(), dim=0) > 0.999
    assert [block.title for block in made.blocks] == ["Kernels", "What excites them", "What of an image excites them"]
    assert made.blocks[2].first is not None


def test_deeper_layers_by_weights_are_shown_too(run: Run) -> None:
    """A filter of single weights is selected if any of them is."""
    made = sheet(run, "5.weight", epochs=[4], count=3, image=7)
    assert [block.title for block in made.blocks] == ["What excites them", "What of an image excites them"]
    support = SolutionPath.load(run.path_file).support("5.weight").any(1)
    for block in made.blocks:
        for heading, tile in zip(block.headings, block.rows[0].tiles, strict=True):
            assert tile.selected == bool(support[int(heading.split()[1])])
            assert tile.values.shape == (1, 8, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer": "9"}, r"layer='9': is not on the path of .*, which has 0, 5"),
        ({"layer": "0", "epochs": [1]}, r"epoch 1\b.*keep"),
        ({"layer": "0", "epochs": [7]}, r"epochs=\[7\]: not on the path of .*; its last point is 4"),
        ({"layer": "0", "image": 10**6}, r"image=1000000: the test split has 355, counted from 0"),
    ],
)
def test_what_cannot_be_shown_is_said(run: Run, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sheet(run, **arguments)


def test_a_sheet_is_a_page_that_asks_for_nothing_or_an_image(run: Run, show: Any, tmp_path: Path) -> None:
    made = sheet(run, "0", epochs=[2, 4], count=2)
    page = show(made.save(tmp_path / "filters.html"), width=390)
    tiles = [tile for block in made.blocks for row in block.rows for tile in row.tiles] + [made.blocks[2].first]
    images = page.locator("img").evaluate_all(
        "all => all.map(i => [i.naturalWidth, i.alt, getComputedStyle(i).outlineColor])"
    )
    assert len(images) == len(tiles)
    for width, alt, outline in images:
        assert width in (3, 8)
        assert alt.endswith("selected") == (outline == "rgb(11, 98, 184)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    with Image.open(made.save(tmp_path / "filters.png")) as image:
        assert image.width > 500
        colours = image.getcolors(1 << 20)
        assert colours is not None
        assert (11, 98, 184) in {colour for _, colour in colours}  # the frames of those selected
    with pytest.raises(ValueError, match=r"must end in \.html or \.png"):
        made.save(tmp_path / "filters.svg")
