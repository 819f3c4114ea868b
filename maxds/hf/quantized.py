"""Quantized tensors: numbers of few bits, and in another tensor the scales of their blocks."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from maxds.hf.files import DTYPES, Tensor

SCALE = "_scale_inv"  # the end of the name of a tensor's scales
SCALES = "F32", "F8_E8M0"  # dtypes of them
BLOCK = 128  # rows and columns of float8 numbers that share a scale
_BLOCKS = {"F8_E4M3": (BLOCK, BLOCK), "I8": (1, 32)}  # I8: float4 (e2m1), two in a byte, that of lower column first
_ROWS = 128  # handled at once

Shape = tuple[int, ...]


def is_quantized(tensor: Tensor) -> bool:
    """Whether it has scales beside it."""
    return tensor.dtype in _BLOCKS


def stored(dtype: str, shape: Shape) -> tuple[Shape, Shape]:
    """The shapes of the tensor that holds quantized [O I], and of its scales."""
    per_byte = 2 if dtype == "I8" else 1
    scales = tuple(-(-n // block) for n, block in zip(shape, _BLOCKS[dtype], strict=True))
    return (*shape[:-1], -(-shape[-1] // per_byte)), scales


def read(found: Mapping[str, Tensor], name: str) -> np.ndarray:
    """The numbers of a tensor, bfloat16 if they are quantized."""
    numbers = found[name].read()
    return dequantized(numbers, found[f"{name}{SCALE}"].read()) if is_quantized(found[name]) else numbers


def dequantized(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float8 [O I], or bytes [O I/2] of two float4, times the scales of their blocks -> bfloat16 [O I].

    Some rows at a time, so that memory holds little more than the result.
    """
    codes = np.arange(256, dtype=np.uint8)
    if numbers.dtype == np.int8:
        values, kind = np.stack([codes & 15, codes >> 4], 1).view(ml_dtypes.float4_e2m1fn), "I8"
    else:
        values, kind = codes[:, None].view(numbers.dtype), "F8_E4M3"
    values, scales, (rows, columns) = values.astype(np.float32), scales.astype(np.float32), _BLOCKS[kind]
    width = numbers.shape[1] * values.shape[1]
    out = np.empty((len(numbers), width), DTYPES["BF16"])
    for i in range(0, len(numbers), _ROWS):
        these = numbers[i : i + _ROWS].view(np.uint8)
        of_rows = np.repeat(scales[i // rows : -(-(i + _ROWS) // rows)], rows, axis=0)[: len(these)]
        out[i : i + _ROWS] = values[these].reshape(len(these), width) * np.repeat(of_rows, columns, axis=1)[:, :width]
    return out
