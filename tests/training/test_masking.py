import pytest
import torch
from torch import nn

from dessilbi import DessiLBI, param_groups
from dessilbi.models import create
from dessilbi.training.masking import masked


def trained(model: nn.Module, keep: dict[str, torch.Tensor], **groups: str | None) -> DessiLBI:
    """An optimizer whose support is `keep` for the tensors that are named, and nothing for the others."""
    optimizer = DessiLBI(param_groups(model, **groups), lr=0.1, lam=0.5)  # type: ignore[arg-type]
    for name, p in model.named_parameters():
        if name in keep:
            mask = keep[name].to(p.dtype)
            dual = mask.view(-1, *[1] * (p.ndim - 1)) if mask.ndim == 1 else mask
            optimizer.state[p]["dual"] = dual.expand_as(p).clone()
    return optimizer


def test_a_masked_filter_is_absent_with_its_bias_and_normalisation() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3))
    nn.init.ones_(model[1].bias)
    nn.init.ones_(model[0].bias)
    nn.init.ones_(model[3].bias)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    kept, last = torch.tensor([True, False, True]), torch.tensor([False, True])
    optimizer = trained(model, {"0.weight": kept, "3.weight": last})
    x = torch.randn(4, 1, 8, 8)
    model.eval()
    with masked(model, optimizer):
        hidden = model[1](model[0](x))
        assert (hidden[:, 1] == 0).all()
        assert (hidden[:, [0, 2]] != 0).any()
        assert torch.equal(model[0].weight[0], before["0.weight"][0])
        assert model[0].bias.tolist() == [1, 0, 1]
        assert model[1].weight.tolist() == [1, 0, 1]
        assert model[1].bias.tolist() == [1, 0, 1]
        assert model[3].bias.tolist() == [0, 1]
        assert (model(x)[:, 0] == 0).all()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_weights_are_masked_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    keep = torch.tensor([[True, False, True], [False, False, False]])
    optimizer = trained(model, {"0.weight": keep})
    bias = model[0].bias.clone()
    with masked(model, optimizer):
        assert torch.equal(model[0].weight != 0, keep)
        assert torch.equal(model[0].bias, bias)
        assert model[1].weight.tolist() == [1, 1]


def test_a_layer_that_is_out_is_zero_altogether() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3))
    optimizer = trained(model, {}, conv="layer")
    model.eval()
    nn.init.ones_(model[1].bias)
    with masked(model, optimizer):
        assert (model(torch.randn(2, 1, 5, 5)) == 0).all()


def test_transposed_and_grouped_convolutions() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6))
    optimizer = DessiLBI(param_groups(model), lr=0.1, lam=0.5)
    weight = model[0].weight
    kept = torch.tensor([1.0, 0, 1, 0, 0, 1])
    dual = kept.view(2, 1, 3, 1, 1).expand(2, 2, 3, 3, 3).reshape_as(weight)
    optimizer.state[weight]["dual"] = dual.clone()
    assert optimizer.support(weight).tolist() == kept.bool().tolist()
    model.eval()
    nn.init.ones_(model[1].bias)
    with masked(model, optimizer):
        out = model(torch.randn(2, 4, 5, 5))
        assert [(out[:, i] != 0).any().item() for i in range(6)] == kept.bool().tolist()


@pytest.mark.parametrize(("name", "norms"), [("resnet20", 19), ("vgg16", 13), ("resnet18", 20), ("lenet5", 0)])
def test_the_normalisations_of_the_networks_are_found(name: str, norms: int) -> None:
    model = create(name)
    optimizer = DessiLBI(param_groups(model), lr=0.1)
    with masked(model, optimizer):
        off = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d) and not m.weight.any() and not m.bias.any()]
        assert len(off) == norms == len([m for m in model.modules() if isinstance(m, nn.BatchNorm2d)])


def test_restored_after_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3))
    before = model[0].weight.clone()
    with pytest.raises(RuntimeError), masked(model, DessiLBI(param_groups(model), lr=0.1)):
        raise RuntimeError
    assert torch.equal(model[0].weight, before)
