import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.files import cifar_pickle, pixels

from dessilbi.data import pickles, read


class Call:
    """Pickles to a call of ``function`` when it is loaded."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("protocol", range(6))
def test_code_in_a_pickle_is_not_run(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "run"
    data = {"data": Call(os.mkdir, str(mark)), "labels": [1]}
    raw = pickle.dumps(data, protocol)
    with pytest.raises(ValueError, match=r"some file: refused, the pickle calls (os|posix|nt).mkdir"):
        pickles.loads(raw, "some file")
    assert not mark.exists()
    pickle.loads(raw)  # the attack itself works
    assert mark.exists()


def test_the_reader_refuses_it_too(tmp_path: Path) -> None:
    mark = tmp_path / "run"
    good = cifar_pickle(pixels(8), fine_labels=list(range(8)))
    evil = b"cposix\nmkdir\nU" + bytes([len(str(mark))]) + str(mark).encode() + b"\x85R0"
    (tmp_path / "train").write_bytes(good[:2] + evil + good[2:])
    with pytest.raises(ValueError, match=r"train: refused, the pickle calls posix.mkdir"):
        read("cifar100", tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "value",
    [
        Call(eval, "1"),
        Call(getattr, "x", "upper"),
        Call(np.load, "x"),
        Call(np.fromfile, "x"),
        Call(pickle.loads, b"N."),
        np.array([None, 1], dtype=object),
        np.float64(1.0),
        np.zeros(2, dtype=[("a", "u1")]),
        Path(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_objects_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="f: refused"):
        pickles.loads(pickle.dumps(value), "f")


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x02cnumpy\ndtype\n}U\x08__call__K\x01sb.",  # changing a stand-in
        b"\x80\x02cnumpy\nndarray\nK\x01\x85R.",  # calling the array type
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n)\x81.",  # making one by its class
        b"\x80\x02cnumpy\ndtype\nU\x02u1\x85R(K\x03U\x06|O,u1zNNNK\x00K\x00K\x00tb.",  # nonsense as byte order
        b"\x80\x02K\x01Q.",  # an outside object
        b"\x80\x02\x82\x01.",  # the extension registry
        b"\x80\x02cdessilbi.data.pickles\nos\n.",
        b".",
        b"\x80\x09N.",
    ],
)
def test_tricks_with_opcodes_end_in_an_error(raw: bytes) -> None:
    data = b"\x80\x02}(U\x04data" + raw.removeprefix(b"\x80\x02").removesuffix(b".") + b"u."
    for attempt in (raw, data):
        with pytest.raises(ValueError, match="^f: "):
            pickles.loads(attempt, "f")


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("dtype", ["u1", "<i8", ">i4", "<f4"])
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_arrays_come_back_whole(protocol: int, dtype: str, order: Any) -> None:
    value = np.arange(12).reshape(3, 4).astype(dtype, order=order)
    found = pickles.loads(pickle.dumps({"a": value, "b": [1, "x", b"y", None, 2.5]}, protocol), "f")
    np.testing.assert_array_equal(found["a"], value)
    assert found["a"].dtype == value.dtype
    assert found["b"] == [1, "x", b"y", None, 2.5]
