"""The candidate's side: what runs in the process that holds the candidate, and nothing else of the judge.

The judge sends one message at a time (load, build, state, put, call, fetch …) and gets one back. Here are no
references, no seeds of later cases, no clock and no verdict; a candidate that takes this module apart learns only
what it was given.

Inputs lie inside a larger buffer filled with 0xFF (NaN in every floating format), so that reading past an end shows in
the result and writing past an end is seen. They can be overwritten in place through another view of the same storage,
which leaves their address, identity and version counter as they were.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import math
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nybble.judge import gpu, wire

_FENCE = 256  # bytes before and after an input: keeps the alignment that allocators give
_PERTURB = -6  # mallopt's M_PERTURB: glibc then fills what it hands out and what it takes back

# What a candidate could replace to look right or fast. Taken before it is imported, compared afterwards.
_WATCHED: list[tuple[Any, str]] = [
    (time, "time"), (time, "perf_counter"), (time, "perf_counter_ns"), (time, "monotonic"), (time, "process_time"),
    (time, "time_ns"), (time, "monotonic_ns"), (time, "sleep"),
    (torch, "allclose"), (torch, "equal"), (torch, "isclose"), (torch, "empty"),
    (torch, "matmul"), (torch, "relu"), (torch, "softmax"),
    (torch.nn.functional, "linear"), (torch.nn.functional, "relu"), (torch.nn.functional, "softmax"),
    (torch, "rand"), (torch, "randn"), (torch.testing, "assert_close"), (torch.cuda, "synchronize"),
    (torch.cuda, "Event"), (torch.cuda.Event, "elapsed_time"), (torch.cuda.Event, "record"),
    (torch.cuda.Event, "synchronize"), (torch.cuda, "Stream"), (torch.cuda, "current_stream"),
    (torch.Tensor, "allclose"),
    (torch.Tensor, "equal"), (torch.Tensor, "__eq__"), (torch.Tensor, "cpu"), (torch.Tensor, "double"),
    (torch.Tensor, "to"), (torch.Tensor, "__torch_function__"), (torch.nn.Module, "__call__"),
    (torch.nn.Module, "load_state_dict"), (torch.Generator, "manual_seed"), (wire, "send"), (wire, "receive"),
    (wire, "pack"), (wire, "to_bytes"), (threading.Thread, "start"),
]  # fmt: skip
# What they compare and mark with: bound now, so that a later replacement does not reach the judge's own calls.
_clone, _numpy, _type = torch.Tensor.clone, torch.Tensor.numpy, type


def flags() -> dict[str, str]:
    """The global switches of torch that change what a rival in the same process would cost or compute."""
    values = {
        "torch.get_num_threads()": torch.get_num_threads(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.backends.mkldnn.enabled": torch.backends.mkldnn.enabled,
        "torch.backends.cudnn.enabled": torch.backends.cudnn.enabled,
        "torch.backends.cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "torch.autograd anomaly mode": torch.is_anomaly_enabled(),
    }
    if torch.cuda.is_initialized():
        values["the limit of persisting L2"] = gpu.persisting_limit()
    return {name: str(value) for name, value in values.items()}


class Listen(TorchDispatchMode):
    """Notes the name of every operation that goes through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # skipping it would import all of it
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Slot:
    """A list of inputs that can be overwritten where they lie, with fences around each tensor."""

    def __init__(self, tree: Any, blobs: Sequence[bytearray], device: str, fence: int) -> None:
        self.device, self.fence = device, fence
        self.bases: list[Tensor] = []
        self.writers: list[Tensor] = []
        self.values: list[Any] = wire.unpack(tree, blobs, self._place, from_judge=True)

    def _place(self, value: Tensor, stride: Sequence[int]) -> Tensor:
        size, item = list(value.shape), value.element_size()
        stride = value.stride() if 0 in stride else stride  # an expanded tensor cannot be written element by element
        extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if value.numel() else 0
        base = torch.full((2 * self.fence + extent * item,), 0xFF, dtype=torch.uint8).to(self.device)
        views = [_view(base, value.dtype, self.fence // item, size, stride) for _ in range(2)]
        views[0].copy_(value)
        self.bases.append(base)
        self.writers.append(views[0])
        return views[1]

    def overwrite(self, tree: Any, blobs: Sequence[bytearray]) -> None:
        """New values at the same addresses."""
        fresh = [value for value in _leaves(wire.unpack(tree, blobs, from_judge=True)) if isinstance(value, Tensor)]
        for writer, value in zip(self.writers, fresh, strict=True):
            writer.copy_(value)

    def fences_hold(self) -> bool:
        """Whether the bytes around every input are as they were."""
        ends = (end for b in self.bases for end in (b[: self.fence], b[b.numel() - self.fence :]))
        return all(bool((end == 0xFF).all()) for end in ends)


def _view(base: Tensor, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    empty = torch.zeros(0, dtype=dtype, device=base.device)
    return empty.set_(base.untyped_storage(), offset, list(size), list(stride))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return [value]


class Worker:
    """Answers the judge's messages, one method each; a method returns the answer's header and blobs."""

    def __init__(self, device: str, fence: int) -> None:
        self.device, self.fence = device, fence
        self.slots: dict[str, Slot] = {}
        self.outputs: list[Any] = []
        self.snapshots: list[Any] = []
        self.factory: Any = None
        self.model: Any = None
        self.call_it: Callable[..., Any] | None = None
        wake(device)
        self.watched = [*_WATCHED, *((owner, name) for owner in (Worker, gpu) for name in vars(owner))]
        self.before = {(id(owner), name): getattr(owner, name) for owner, name in self.watched}
        self.switches = flags()

    def load(self, path: str, name: str) -> Any:
        """Import the candidate: a file or a module, and the class or function in it."""
        if path.endswith(".py"):
            spec = importlib.util.spec_from_file_location("candidate", path)
            if spec is None or spec.loader is None:
                raise ImportError(f"{path} is no Python file")
            module = importlib.util.module_from_spec(spec)
            sys.modules["candidate"] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(path)
        if not hasattr(module, name):
            return {"missing": name, "names": [n for n in vars(module) if not n.startswith("_")][:40]}, []
        self.factory = getattr(module, name)
        return {}, []

    def build(self, init: Any, blobs: list[bytearray], seed: int, function: bool, how: str = "eager") -> Any:
        """Make the model from its arguments, or take the function as it is; `how` is one of timing.BASELINES."""
        self.slots.clear()
        self.outputs, self.snapshots = [], []
        torch.manual_seed(seed)
        model = self.factory if function else self.factory(*wire.unpack(init, blobs, from_judge=True))
        self.model = model.to(self.device).eval() if isinstance(model, torch.nn.Module) else model
        self.call_it = self._wrapped(how)
        return {"parameters": [[k, list(v.shape), str(v.dtype)] for k, v in self._state().items()]}, []

    def _wrapped(self, how: str) -> Any:
        if how == "compile":
            return torch.compile(self.model, mode="default" if self.device == "cpu" else "max-autotune-no-cudagraphs")
        return gpu.Replayed(self.model) if how == "graph" else self.model

    def _state(self) -> dict[str, Tensor]:
        return self.model.state_dict() if isinstance(self.model, torch.nn.Module) else {}

    def state(self, tree: Any, blobs: list[bytearray]) -> Any:
        """Give the model new weights, in place, by the name its own state has them under."""
        if isinstance(self.model, torch.nn.Module):
            self.model.load_state_dict(wire.unpack(tree, blobs), strict=False)
        return {}, []

    def put(self, slot: str, tree: Any, blobs: list[bytearray], in_place: bool) -> Any:
        """Inputs at new addresses, or new values at the old ones."""
        if in_place:
            self.slots[slot].overwrite(tree, blobs)
        else:
            self.slots[slot] = Slot(tree, blobs, self.device, self.fence)
        return {}, []

    def call(self, slots: list[str], keep: bool = False) -> Any:
        """Run on each slot; a copy of every output is taken the moment it is returned."""
        self.outputs, self.snapshots = [], []
        for slot in slots:
            output = self._run(slot)
            self.outputs.append(output)
            self.snapshots.append([_clone(v.detach()) if _type(v) is Tensor else v for v in _as_list(output)])
        return {"outputs": [self._describe(o, s) for o, s in zip(self.outputs, slots, strict=True)]}, []

    def timed(self, slots: list[str]) -> Any:
        """Run on each slot and answer at once; outputs are copied after the answer."""
        self.snapshots = []
        self.outputs = [self._run(slot) for slot in slots]
        if self.device != "cpu":
            gpu.synchronize()
        return {}, []

    def shared(self) -> Any:
        """Whether two calls' outputs lie in the same memory, so that only the last one can be looked at."""
        firsts = [v.data_ptr() for o in self.outputs for v in _as_list(o)[:1] if _type(v) is Tensor and v.numel()]
        return {"shared": len(set(firsts)) < len(firsts)}, []

    def _run(self, slot: str) -> Any:
        if self.call_it is None:
            raise RuntimeError("call before build")
        with torch.no_grad():
            return self.call_it(*self.slots[slot].values)

    def _describe(self, output: Any, slot: str) -> list[dict[str, Any]]:
        ranges = [(b.data_ptr(), b.data_ptr() + b.nbytes) for b in self.slots[slot].bases]
        return [_facts(value, ranges) for value in _as_list(output)]

    def fetch(self, what: str, index: int = 0) -> Any:
        """Outputs as they were when returned, outputs as they are now, inputs or weights as they are now."""
        blobs: list[bytes | memoryview] = []
        if what == "outputs" and self.snapshots:
            value: Any = self.snapshots[index]
        elif what in ("outputs", "later"):
            value = _as_list(self.outputs[index])
        else:
            value = self._state() if what == "state" else list(self.slots[what].values)
        value = [_tangible(v) for v in value] if isinstance(value, list) else value
        return {"value": wire.pack(value, blobs)}, blobs

    def fences(self) -> Any:
        """Whether nothing was written around any input."""
        return {"hold": all(slot.fences_hold() for slot in self.slots.values())}, []

    def poison(self, byte: int) -> Any:
        """Fill fresh memory with a byte from now on (0: as it comes); on a GPU torch's pool, once."""
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_PERTURB, byte)
        if self.device != "cpu" and byte:
            gpu.poison(byte)
        return {}, []

    def patched(self) -> Any:
        """Names that are no longer what they were before the candidate came, and switches it turned."""
        names = [f"{getattr(o, '__name__', o)}.{n}" for o, n in self.watched if not _same(o, n, self.before[id(o), n])]
        names += [f"this worker's {name}" for name in vars(self) if hasattr(Worker, name)]
        now = flags()
        turned = [f"{k} from {self.switches[k]} to {now[k]}" for k in now if now[k] != self.switches[k]]
        return {"names": names, "switches": turned}, []

    def trace(self, slot: str) -> Any:
        """The names of the framework's operations that one call goes through."""
        with Listen() as listening:
            self._run(slot)
        return {"operations": listening.seen[:10_000]}, []

    def device_times(self, slots: list[str]) -> Any:
        """`timed` on the device's own clock, see gpu.py."""
        self.snapshots = []
        times, self.outputs = gpu.measure(self._run, slots)
        return times, []


def _same(owner: Any, name: str, before: Any) -> bool:
    now = getattr(owner, name, None)
    return now is before or now == before


def _as_list(output: Any) -> list[Any]:
    return list(output) if isinstance(output, list | tuple) else [output]


def _tangible(value: Any) -> Any:
    """What can be sent: no other types, and of a tensor without memory its shape and dtype; facts tell what it was."""
    if not isinstance(value, Tensor):
        return None
    return torch.empty(value.shape, dtype=value.dtype) if value.device.type == "meta" else value


def _facts(value: Any, inputs: list[tuple[int, int]]) -> dict[str, Any]:
    """What an output is, without running any code of its class."""
    kind = _type(value)
    facts: dict[str, Any] = {"type": f"{kind.__module__}.{kind.__qualname__}", "tensor": kind is Tensor}
    if kind is not Tensor:
        return facts
    at = value.data_ptr() if value.layout == torch.strided else 0
    return facts | {
        "dtype": str(value.dtype), "shape": list(value.shape), "stride": list(value.stride()),
        "device": value.device.type, "layout": str(value.layout),
        "bytes": value.untyped_storage().nbytes() if value.layout == torch.strided else -1,
        "empty": math.prod(value.shape) == 0, "null": at == 0,
        "input": any(low <= at < high for low, high in inputs),
    }  # fmt: skip


def wake(device: str, memory: int | None = None) -> None:
    """Start a GPU's driver in this process; torch's pool may then take that many bytes of the GPU's memory."""
    if device == "cpu":
        return
    index = torch.device(device).index
    if index is not None:
        torch.cuda.set_device(index)  # "cuda" then means this one
    torch.zeros(1, device=device)
    if memory is not None:
        share = memory / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))


def serve(channel: socket.socket, device: str, fence: int = _FENCE) -> None:
    """Answer messages until the judge closes the channel. An exception of the candidate is an answer, too."""
    worker, send, receive = Worker(device, fence), wire.send, wire.receive
    while True:
        try:
            header, blobs = receive(channel)
        except wire.BrokenWire:
            return
        header.pop("sizes")
        todo = getattr(worker, header.pop("do"))
        if {"tree", "init"} & header.keys():
            header["blobs"] = blobs
        try:
            answer, back = todo(**header)
        except Exception as error:  # noqa: BLE001 - whatever the candidate raises is its answer
            answer, back = _explain(error), []
        send(channel, {"did": True, **answer}, back)


def main() -> None:
    """Serve the socket at the place and the device named by the arguments, without fences: for a tool that watches."""
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(sys.argv[1])
    serve(channel, sys.argv[2], fence=0)


def stack(error: BaseException) -> str:
    """The end of an exception's stack, without the judge's frames and what torch puts around a module's call."""
    own = (str(Path(__file__).parent), torch.nn.modules.module.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(own)] or list(frames)
    told = [*traceback.format_list(theirs[-4:]), *traceback.format_exception_only(error)]
    return "\n".join("".join(told).splitlines()[-12:])[:4000]


def _explain(error: Exception) -> dict[str, Any]:
    return {"error": type(error).__name__, "message": str(error)[:2000], "trace": stack(error)}


if __name__ == "__main__":
    main()
