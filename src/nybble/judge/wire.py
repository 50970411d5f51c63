"""Messages between the judge and a candidate's process: a JSON header and raw bytes, never a pickle.

Unpickling runs code that the sender chose, so one pickle from the candidate would hand it the judge. (The judge may
send one: an argument that is neither number, text nor tensor, such as a quantized weight, goes to the candidate so.)
Here the judge reads numbers and text only. A value (tensors, numbers, text, lists and dictionaries of these) becomes
a JSON tree in which a tensor is named by dtype, shape and strides, and its elements follow as one block of bytes in
row-major order.
"""

from __future__ import annotations

import json
import math
import pickle
import struct
from collections.abc import Callable, Sequence
from socket import socket
from typing import Any

import torch
from torch import Tensor

_HEADER_LIMIT = 1 << 22
_BODY_LIMIT = 4 << 30


class BrokenWire(Exception):
    """The other end closed, or what it sent is not a message."""


def send(channel: socket, header: dict[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> None:
    """Write one message."""
    text = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
    channel.sendall(struct.pack("<I", len(text)) + text)
    for blob in blobs:
        channel.sendall(blob)


def receive(channel: socket) -> tuple[dict[str, Any], list[bytearray]]:
    """Read one message.

    Raises:
        BrokenWire: the channel closed, or what came is not a message.
    """
    (length,) = struct.unpack("<I", _exactly(channel, 4))
    if length > _HEADER_LIMIT:
        raise BrokenWire(f"a header of {length} bytes")
    try:
        header = json.loads(bytes(_exactly(channel, length)))
        sizes = [int(size) for size in header["sizes"]]
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenWire(f"not a message: {error}") from error
    if min(sizes, default=0) < 0 or sum(sizes) > _BODY_LIMIT:
        raise BrokenWire(f"a body of {sum(sizes)} bytes")
    return header, [_exactly(channel, size) for size in sizes]


def _exactly(channel: socket, count: int) -> bytearray:
    data = bytearray(count)
    view, got = memoryview(data), 0
    while got < count:
        step = channel.recv_into(view[got:])
        if step == 0:
            raise BrokenWire("the channel closed")
        got += step
    return data


def pack(value: Any, blobs: list[bytes | memoryview]) -> Any:
    """The JSON tree of a value; the elements of its tensors are appended to blobs."""
    if isinstance(value, Tensor):
        blobs.append(to_bytes(value))
        return {
            "tensor": len(blobs) - 1,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "stride": list(value.stride()),
        }
    if isinstance(value, torch.dtype):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return {"list": [pack(item, blobs) for item in value], "tuple": isinstance(value, tuple)}
    if isinstance(value, dict):
        return {"dict": [[key, pack(item, blobs)] for key, item in value.items()]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    blobs.append(pickle.dumps(value))
    return {"pickle": len(blobs) - 1}


def unpack(
    tree: Any,
    blobs: Sequence[bytearray],
    place: Callable[[Tensor, Sequence[int]], Tensor] | None = None,
    from_judge: bool = False,
) -> Any:
    """The value of a tree. `place` takes each contiguous tensor and the strides it had, and gives the one to use.

    Only what comes `from_judge` may hold pickles.

    Raises:
        BrokenWire: the tree is not one that `pack` writes.
    """
    try:
        return _unpack(tree, blobs, place, from_judge)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise BrokenWire(f"not a value: {type(error).__name__}: {error}") from error


def _unpack(
    tree: Any, blobs: Sequence[bytearray], place: Callable[[Tensor, Sequence[int]], Tensor] | None, from_judge: bool
) -> Any:
    if "tensor" in tree:
        value = from_bytes(blobs[tree["tensor"]], tree["dtype"], tree["shape"])
        return value if place is None else place(value, tree["stride"])
    if "list" in tree:
        items = [_unpack(item, blobs, place, from_judge) for item in tree["list"]]
        return tuple(items) if tree["tuple"] else items
    if "dict" in tree:
        return {key: _unpack(item, blobs, place, from_judge) for key, item in tree["dict"]}
    if from_judge and "pickle" in tree:
        return pickle.loads(blobs[tree["pickle"]])
    return _dtype(tree["torch"]) if "torch" in tree else tree["value"]


def to_bytes(value: Tensor) -> memoryview:
    """The elements in row-major order."""
    # `contiguous` leaves the stride of a single element as it is, and such a tensor cannot be viewed as bytes.
    flat = torch.zeros(value.numel(), dtype=value.dtype)
    flat.copy_(value.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def from_bytes(data: bytearray, dtype: str, shape: Sequence[int]) -> Tensor:
    """The tensor whose elements in row-major order are these bytes."""
    kind = _dtype(dtype)
    if len(data) != math.prod(shape) * kind.itemsize:
        raise BrokenWire(f"{len(data)} bytes for {dtype} {tuple(shape)}")
    if not data:
        return torch.zeros(tuple(shape), dtype=kind)
    return torch.frombuffer(data, dtype=kind).reshape(tuple(shape))


def _dtype(name: str) -> torch.dtype:
    kind = getattr(torch, name)
    if not isinstance(kind, torch.dtype):
        raise BrokenWire(f"{name!r} is no dtype")
    return kind
