"""Arrays for a page: as text (their bytes in planes, deflated, in base64), or as bytes for a kernel's page."""

import base64
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

DTYPES = {"<f8": "f8", "<f4": "f4", "<f2": "f2", "<u4": "u4", "<u2": "u2", "|u1": "u1"}
"""Data types that the page reads: numpy's name -> the page's."""


Pack = Callable[[npt.NDArray[Any]], dict[str, Any]]
"""`packed` or `plain`: an array as a page reads it, with its bytes or characters at "data"."""

LEVEL = 6
"""Compression level of deflate; 9 takes minutes on random scores and saves 1%."""


def packed(array: npt.NDArray[Any]) -> dict[str, Any]:
    """An array as the page reads it: its type, its shape and its bytes.

    The first bytes of all numbers come first, then all second bytes, and so on, since signs and exponents of scores
    are similar and compress well side by side.

    Raises:
        ValueError: a data type that the page does not read.
    """
    array = _readable(array)
    planes = np.ascontiguousarray(array.reshape(-1).view(np.uint8).reshape(-1, array.dtype.itemsize).T)
    data = base64.b64encode(zlib.compress(planes.tobytes(), LEVEL)).decode("ascii")
    return {"dtype": DTYPES[array.dtype.str], "shape": list(array.shape), "data": data}


def plain(array: npt.NDArray[Any]) -> dict[str, Any]:
    """An array as a page with a kernel reads it: its type, its shape and its bytes as they are.

    Raises:
        ValueError: a data type that the page does not read.
    """
    array = _readable(array)
    return {"dtype": DTYPES[array.dtype.str], "shape": list(array.shape), "data": array.tobytes()}


def _readable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array = np.ascontiguousarray(array)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype.str not in DTYPES:
        raise ValueError(f"an array of {array.dtype}; the page reads {', '.join(DTYPES.values())}")
    return array


def narrow(array: npt.NDArray[Any], largest: int) -> npt.NDArray[Any]:
    """Whole numbers from 0 to `largest` in the smallest unsigned type that holds them."""
    return array.astype(np.uint8 if largest < 2**8 else np.uint16 if largest < 2**16 else np.uint32)
