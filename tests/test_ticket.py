"""Tickets: what a file holds, and what becomes of a network that takes one up."""

from pathlib import Path

import pytest
import torch
from torch import nn

from dessilbi import Selection, Ticket
from tests.training.nets import tiny

FACTS = {"data": "digits", "epoch": 3}


def selection() -> Selection:
    generator = torch.Generator().manual_seed(7)
    convolution = torch.rand(6, 1, 3, 3, generator=generator) < 0.3
    return Selection({"0.weight": convolution, "5.weight": torch.rand(10, 54, generator=generator) < 0.1})


def network(seed: int, **sizes: int) -> nn.Module:
    torch.manual_seed(seed)
    return tiny(**sizes)


def ticket() -> Ticket:
    return Ticket(selection(), network(1).state_dict(), FACTS)


def test_what_is_out_is_no_part_of_it() -> None:
    sel, before = selection(), network(1).state_dict()
    for name, value in ticket().weights.items():
        assert torch.equal(value, before[name] * sel[name] if name in sel else before[name]), name


def test_a_file_holds_all_of_it_and_little_more(tmp_path: Path) -> None:
    file = tmp_path / "one.ticket"
    mine = ticket()
    mine.save(file)
    back = Ticket.load(file)
    assert back.facts == mine.facts
    assert back.weights.keys() == mine.weights.keys()
    assert all(torch.equal(back.weights[n], w) and back.weights[n].dtype == w.dtype for n, w in mine.weights.items())
    assert all(torch.equal(back.selection[n], m) for n, m in selection().items())
    large = nn.Sequential(nn.Linear(1000, 1000, bias=False))
    kept = torch.zeros(1000, 1000, dtype=torch.bool)
    kept[::50] = True
    Ticket(Selection({"0.weight": kept}), large.state_dict(), FACTS).save(file)
    # A bit a weight, four bytes for one in fifty.
    assert 1e6 / 8 + 4e6 / 50 < file.stat().st_size < 1.01 * (1e6 / 8 + 4e6 / 50) + 1000


def test_on_its_own_data_everything_is_taken_over() -> None:
    model, source = network(2), network(1).state_dict()
    sel = ticket().place(model, "digits[:500]")
    with sel.applied(model):
        for name, value in model.state_dict().items():
            assert torch.equal(value, source[name] * sel[name] if name in sel else source[name]), name


def test_on_other_data_the_head_starts_anew() -> None:
    model, own, source = network(2), network(2).state_dict(), network(1).state_dict()
    sel = ticket().place(model, "mnist")
    assert torch.equal(model.state_dict()["0.weight"], source["0.weight"] * sel["0.weight"])
    for name in ("5.weight", "5.bias"):
        assert torch.equal(model.state_dict()[name], own[name])
    assert all(torch.equal(sel[name], mask) for name, mask in selection().items())


def test_another_number_of_classes() -> None:
    model, mine = network(2, num_classes=4), ticket()
    sel = mine.place(model, "digits[0-3]", seed=5)
    share = int(selection()["5.weight"].sum()) / 540
    assert int(sel["5.weight"].sum()) == round(share * 4 * 54)
    assert sel["5.weight"].shape == (4, 54)
    again, other = (mine.place(network(2, num_classes=4), "digits[0-3]", seed=s)["5.weight"] for s in (5, 6))
    assert torch.equal(sel["5.weight"], again)
    assert not torch.equal(again, other)


def test_filters_too() -> None:
    sel = Selection({"0.weight": torch.tensor([1, 0, 1, 1, 0, 1]).bool(), "5.weight": torch.arange(10) < 5}, "filter")
    mine, model = Ticket(sel, network(1).state_dict(), FACTS), network(2, num_classes=4)
    placed = mine.place(model, "digits[0-3]")
    assert torch.equal(placed["0.weight"], sel["0.weight"])
    assert int(placed["5.weight"].sum()) == 2
    placed.masks(model)  # fits


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (tiny(in_channels=3), r"0.weight has shape \(6, 3, 3, 3\) in the network and \(6, 1, 3, 3\) in the ticket"),
        (nn.Sequential(nn.Linear(3, 3)), "the ticket has '0.bias'|0.weight has shape"),
        (nn.Sequential(*tiny(), nn.Linear(10, 10)), "the network has '6.weight' and the ticket has not"),
        (nn.Sequential(nn.Conv2d(1, 6, 3)), "the ticket has '1.weight' and the network has not"),
    ],
)
def test_networks_that_it_is_not_of(model: nn.Module, message: str) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        ticket().place(model, "digits")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_bad_tickets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="facts lack 'data'"):
        Ticket(selection(), network(1).state_dict(), {"epoch": 2})
    with pytest.raises(ValueError, match=r"the weights lack 0\.weight"):
        Ticket(selection(), {}, FACTS)
    file = tmp_path / "one.ticket"
    selection().save(file)
    with pytest.raises(ValueError, match="not a dessilbi ticket file but a selection"):
        Ticket.load(file)
    ticket().save(file)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ValueError, match="truncated or not"):
        Ticket.load(file)
