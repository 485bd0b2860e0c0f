import subprocess
import sys

import pytest

from dessilbi import data


def test_names_and_descriptions_need_no_torch() -> None:
    code = (
        "import sys; from dessilbi import data; data.describe(data.names()[0]); "
        "sys.exit(any(heavy in sys.modules for heavy in ('torch', 'numpy', 'requests', 'pooch', 'PIL')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    assert all(getattr(data, name) for name in data.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        data.nothing  # noqa: B018


@pytest.mark.parametrize("name", data.names())
def test_entries_are_consistent(name: str) -> None:
    entry = data.describe(name)
    assert entry.name == name
    assert len(entry.mean) == len(entry.std) == entry.shape[0]
    assert len(set(entry.classes)) == len(entry.classes) == (100 if name == "cifar100" else 10)
    sums = [*entry.files.values(), *(remote.md5 for remote in entry.official)]
    assert all(len(md5) == 32 and set(md5) <= set("0123456789abcdef") for md5 in sums)
    assert len({remote.name for remote in entry.official}) == len(entry.official)


def test_unknown_names_get_advice() -> None:
    with pytest.raises(ValueError, match="'cifar': did you mean 'cifar10'"):
        data.describe("cifar")
    with pytest.raises(ValueError, match="choose one of mnist, fashion-mnist"):
        data.describe("qqq")
    with pytest.raises(ValueError, match="ImageFolder"):
        data.read("imagenet")
    with pytest.raises(ValueError, match=r"split='val': mnist has 'train' and 'test'"):
        data.read("mnist", split="val")
