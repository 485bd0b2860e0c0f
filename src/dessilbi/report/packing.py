"""Norms over the path in few bytes: quantised, differenced, deflated, as text for a page.

A group's norm changes little from point to point, so what is kept is by how much, in units of 1/4095 of the largest
norm of the tensor (0.024 %: less than a pixel of any figure). `assets/data.js` reads it back.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np

LEVELS = 4095
# A code that no number has: where a norm is not finite.
MISSING = 65535


def pack_norms(norms: np.ndarray) -> tuple[str, float]:
    """(points, groups) norms, and their largest: text, in which the history of one group follows that of another."""
    finite = np.isfinite(norms)
    top = float(norms.max(where=finite, initial=0.0))
    codes = np.rint(np.where(finite, norms, 0) * (LEVELS / top if top else 0.0)).astype(np.uint16)
    codes[~finite] = MISSING
    gaps = np.diff(codes.T, axis=1, prepend=np.uint16(0)).astype(np.int16)  # modulo 2¹⁶
    folded = ((gaps << 1) ^ (gaps >> 15)).astype(np.uint16).ravel()  # small for small gaps of either sign
    planes = np.concatenate([(folded & 255), (folded >> 8)]).astype(np.uint8)
    return _text(planes.tobytes()), top


def pack_supports(supports: np.ndarray) -> str:
    """(points, groups) bool: text, a bit a group, as what changed from point to point."""
    changes = supports ^ np.concatenate([np.zeros_like(supports[:1]), supports[:-1]])
    return _text(np.packbits(changes, axis=1, bitorder="little").tobytes())


def _text(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")
