"""`docs/extending.md` runs as it stands, and what it adds does what it says."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.docs.pages import blocks

from dessilbi.applications.methods import KINDS
from dessilbi.surgery import rules


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Any:
    known, operators = dict(KINDS), dict(rules._RULES)
    place: dict[str, Any] = {"__name__": "extending"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("extending"))
        for _, text in blocks("extending.md", "python"):
            exec(compile(text, "docs/extending.md", "exec", dont_inherit=True), place)
        yield place
    for table, before in ((KINDS, known), (rules._RULES, operators)):
        table.clear()
        table.update(before)


def test_the_new_group_is_switched_as_a_whole(names: dict[str, Any]) -> None:
    weight = names["model"][0].weight.detach()
    gamma = names["optimizer"].gamma(names["model"][0].weight)
    kept = (gamma.reshape(32, 4, 4) != 0).numpy()
    assert (kept.all(-1) == kept.any(-1)).all()
    assert kept.any(-1).mean() == pytest.approx(0.25, abs=0.02)
    np.testing.assert_array_equal(names["support"].reshape(32, 4), kept.any(-1))
    np.testing.assert_array_equal((weight.reshape(32, 4, 4) != 0).any(-1), kept.any(-1))
    # The first block of a row holds all that the labels depend on.
    assert kept.any(-1)[:, 0].sum() > kept.any(-1)[:, 1:].sum()


def test_its_proximal_map_is_the_formula(names: dict[str, Any]) -> None:
    v, part = torch.randn(6, 8, dtype=torch.float64), names["Blocks"](4)
    found = part.prox(part.split(v), 1.5).reshape(6, 8).numpy()
    for row in range(6):
        for block in range(2):
            group = v[row, 4 * block : 4 * block + 4].numpy()
            expected = group * max(0.0, 1 - 1.5 / np.linalg.norm(group))
            np.testing.assert_allclose(found[row, 4 * block : 4 * block + 4], expected, rtol=1e-12)
    with pytest.raises(ValueError, match="does not divide the rows"):
        part.check((3, 6))


def test_the_operator_is_refused_and_then_followed(names: dict[str, Any]) -> None:
    assert "bent" in names["refusal"]
    small, net, images = names["small"], names["net"], names["images"]
    assert small[0].weight.shape[0] == 3
    with names["half"].applied(net):
        expected = net(images)
    torch.testing.assert_close(small(images), expected)


def test_the_baseline_is_compared(names: dict[str, Any]) -> None:
    assert names["wrong"] == []
    rows = {row["method"]: row for row in names["table"]}
    assert rows.keys() == {"dense", "taylor-lamp", "magnitude-lamp"}
    assert rows["taylor-lamp"]["difference"] == pytest.approx(
        rows["taylor-lamp"]["mean"] - rows["magnitude-lamp"]["mean"]
    )
    # By hand: the weights of one linear layer whose |w · gradient| is largest.
    net = torch.nn.Sequential(torch.nn.Linear(5, 4))
    x, y = torch.randn(9, 5), torch.randint(4, (9,))
    sel = names["taylor"](net, x, y, 0.25)
    w, b = (p.detach().double().numpy() for p in net[0].parameters())
    out = x.double().numpy() @ w.T + b
    p = np.exp(out - out.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(9), y.numpy()] -= 1
    score = np.abs(w * (p.T @ x.double().numpy() / 9))
    assert set(np.flatnonzero(sel["0.weight"].numpy())) == set(np.argsort(score.ravel())[-5:])
