"""A pickle reader that cannot run code.

``pickle.load`` calls whatever the file names. This one admits only what CIFAR's python version needs: dicts,
lists, tuples, numbers, strings, bytes, and numeric NumPy arrays; any other name in the file is refused. Even
NumPy's own unpickling is not called: the three names that an array's pickle uses are answered by stand-ins
that rebuild it from its type, shape and bytes.
"""

import io
import pickle
from typing import Any, NoReturn

import numpy as np

_NUMERIC = frozenset(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)) | {"f4", "f8"}
_ORDERS = "<>|="


def loads(raw: bytes, where: object) -> Any:
    """The object in the pickle ``raw``, text of Python 2 as ``bytes``; ``where`` names the file in errors."""
    try:
        return _finish(_Unpickler(io.BytesIO(raw), encoding="bytes").load())
    except _RefusedError as error:
        raise ValueError(
            f"{where}: refused, {error}: a data file holds only arrays, lists, numbers and strings"
        ) from None
    except Exception as error:  # a broken pickle may raise anything; nothing in it was executed
        raise ValueError(f"{where}: not a readable pickle ({type(error).__name__}: {error}): get it again") from error


class _RefusedError(Exception):
    pass


class _Inert:
    """Whatever a pickle tries to do to a stand-in beyond its one use is refused."""

    __slots__ = ()

    def __setstate__(self, state: object) -> NoReturn:
        raise _RefusedError(f"the pickle changes {type(self).__name__.strip('_')}")


class _Type:
    """Stands for a ``numpy.dtype`` being built: its code, then its byte order from the state."""

    __slots__ = ("code",)

    def __init__(self, code: str) -> None:
        self.code = code.lstrip(_ORDERS)
        if self.code not in _NUMERIC:
            raise _RefusedError(f"the pickle holds an array of type {code!r}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = _text(state[1])
        if order not in tuple(_ORDERS):
            raise _RefusedError(f"the pickle holds an array of byte order {order!r}")
        self.code = order + self.code.lstrip(_ORDERS)


class _Array:
    """Stands for a ``numpy.ndarray`` being built: empty, then all of it from the state."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, data = state
        self.array = _array(data, kind, shape, "F" if fortran else "C")


class _NewType(_Inert):
    def __call__(self, code: object, *_: object) -> _Type:
        return _Type(_text(code))


class _NewArray(_Inert):
    def __call__(self, *_: object) -> _Array:
        return _Array()


class _FromBuffer(_Inert):
    def __call__(self, data: bytes, kind: _Type, shape: tuple[int, ...], order: object) -> _Array:
        built = _Array()
        built.array = _array(data, kind, shape, _text(order))
        return built


_ADMITTED = {
    ("numpy", "dtype"): _NewType(),
    ("numpy", "ndarray"): _Inert(),
    ("numpy.core.multiarray", "_reconstruct"): _NewArray(),
    ("numpy._core.multiarray", "_reconstruct"): _NewArray(),
    ("numpy.core.numeric", "_frombuffer"): _FromBuffer(),
    ("numpy._core.numeric", "_frombuffer"): _FromBuffer(),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise _RefusedError(f"the pickle calls {module}.{name}") from None

    def persistent_load(self, pid: object) -> NoReturn:
        raise _RefusedError(f"the pickle refers to an outside object {pid!r}")


def _array(data: bytes, kind: _Type, shape: tuple[int, ...], order: str) -> np.ndarray[Any, Any]:
    flat = np.frombuffer(bytearray(data), np.dtype(kind.code))
    return flat.reshape(shape, order="F" if order == "F" else "C")


def _text(value: object) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


def _finish(value: object) -> object:
    """Put the arrays where their stand-ins are, in the top level of the object: where data files have
    them."""
    if isinstance(value, dict):
        return {key: _finish_one(item) for key, item in value.items()}
    return _finish_one(value)


def _finish_one(value: object) -> object:
    return value.array if isinstance(value, _Array) else value
