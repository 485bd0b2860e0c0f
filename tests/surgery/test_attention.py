"""Heads of attention that go, against torch's own module."""

import pytest
import torch
from torch import nn

from dessilbi import Selection, load_shrunk, save_shrunk, shrink
from dessilbi.surgery.attention import HeadAttention
from tests.surgery import zoo


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", ["none", "causal", "float", "one a head", "padding", "both"])
def test_with_all_heads_it_is_torchs_module(batch_first, need_weights, mask):
    torch.manual_seed(0)
    theirs = zoo.randomise(nn.MultiheadAttention(12, 3, batch_first=batch_first), 0).eval()
    ours = HeadAttention.of(theirs, (0, 1, 2)).eval()
    q, kv = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    if not batch_first:
        q, kv = q.transpose(0, 1), kv.transpose(0, 1)
    masks = {}
    if mask in ("causal", "both"):
        masks["attn_mask"] = torch.ones(5, 7, dtype=torch.bool).triu(1)
    if mask == "float":
        masks["attn_mask"] = torch.randn(5, 7)
    if mask == "one a head":
        masks["attn_mask"] = torch.randn(2 * 3, 5, 7)
    if mask in ("padding", "both"):
        masks["key_padding_mask"] = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
    with torch.no_grad():
        expected, weights = theirs(q, kv, kv, need_weights=need_weights, **masks)
        found, own = ours(q, kv, kv, need_weights=need_weights, **masks)
    torch.testing.assert_close(found, expected)
    assert (own is None) == (weights is None)
    if need_weights:
        torch.testing.assert_close(own, weights)


def test_without_a_batch():
    theirs = zoo.randomise(nn.MultiheadAttention(12, 3), 0).eval()
    ours, x = HeadAttention.of(theirs, (0, 1, 2)).eval(), torch.randn(5, 12)
    for found, expected in zip(ours(x, x, x), theirs(x, x, x), strict=True):
        torch.testing.assert_close(found, expected)


def head_off(heads, width, off):
    rows = torch.ones(3, heads, width, dtype=torch.bool)
    rows[:, off] = False
    return rows.flatten()


def test_a_head_goes_with_its_part_of_all_projections(tmp_path):
    net = zoo.FOREIGN["vit_mha"]
    model, x = net.build(), net.inputs()
    sel = Selection({"blocks.0.attn.attn.in_proj_weight": head_off(3, 4, 1)})
    with torch.no_grad(), sel.applied(model):
        expected = model(x)
    small = shrink(model, sel, x)
    attention = small.blocks[0].attn.attn
    assert (attention.heads, tuple(attention.in_proj_weight.shape)) == ((0, 2), (24, 12))
    assert tuple(attention.out_proj.weight.shape) == (12, 8)
    assert type(small.blocks[1].attn.attn) is nn.MultiheadAttention
    kept = head_off(3, 4, 1)
    assert torch.equal(attention.in_proj_weight, model.blocks[0].attn.attn.in_proj_weight[kept])
    with torch.no_grad():
        assert zoo.outputs_close(expected, small(x))
    save_shrunk(small, tmp_path / "small")
    again = load_shrunk(tmp_path / "small", factory=net.factory).eval()
    with torch.no_grad():
        assert torch.equal(again(x), small(x))
    # Half a head is not a head.
    half = head_off(3, 4, 1) | (torch.arange(36) % 4 == 0)
    whole = shrink(model, Selection({"blocks.0.attn.attn.in_proj_weight": half}), x)
    assert type(whole.blocks[0].attn.attn) is nn.MultiheadAttention


def test_the_encoder_layer_of_torch():
    layer = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)
    model = zoo.randomise(nn.Sequential(layer, nn.Linear(12, 4)), 0).eval()
    x = torch.randn(2, 5, 12)
    hidden = torch.arange(20) % 4 != 0
    sel = Selection({"0.self_attn.in_proj_weight": head_off(3, 4, 2), "0.linear1.weight": hidden})
    with sel.applied(model):
        expected = model(x)
    small = shrink(model, sel, x)
    assert (small[0].linear1.out_features, small[0].linear2.in_features) == (15, 15)
    assert small[0].self_attn.heads == (0, 1)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            assert zoo.outputs_close(expected, small(x))
