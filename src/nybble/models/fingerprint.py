"""A model's fingerprint: what it computes from a prompt, op by op, to be compared on another machine.

    nybble fingerprint MODEL -o FILE        write it
    nybble fingerprint MODEL --check FILE   compute it again here, and compare

A JSON file holds which model (a hash of its weights and of what decides its shape), which version of nybble, which
promise, the prompt and the greedy tokens after it, a hash of the rotary tables, one for each op of the forward over the
prompt in the order in which they run, and one for the logits of each decoded token. Machines that keep
"cross-machine" write the same file but for the line that names the machine.

Hashes are the first 16 hexadecimal digits of SHA-256 over a tensor's bytes, little-endian.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import BadInput, DamagedFile
from nybble.files import write_whole
from nybble.models.promised import PromisedRunner, rope_settings
from nybble.ops import QuantLinear
from nybble.ops._declare import Promise
from nybble.quantize.layouts import DENSE

VERSION = 1
"""Of the file's layout."""
_SHAPE = ("model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
_DIGITS = 16
_DTYPES = ("float32", "bfloat16", "float16")
_KEYS = {"fingerprint": int, "nybble": str, "promise": str, "model": str, "dtype": str, "machine": str,
         "prompt": list, "tokens": list, "tables": str, "ops": list, "logits": list}  # fmt: skip


def model_hash(model: nn.Module) -> str:
    """SHA-256 of a model's weights, whatever layout or device they are in, and of what its shapes do not say."""
    config: Any = model.config
    digest = hashlib.sha256(repr([(name, getattr(config, name, None)) for name in _SHAPE]).encode())
    digest.update(repr(sorted(rope_settings(config).items())).encode())
    for name, module in sorted(model.named_modules(), key=lambda pair: pair[0]):
        parts: dict[str, Tensor] = {leaf: p for leaf, p in module._parameters.items() if p is not None}
        if isinstance(module, QuantLinear):
            weight = module.weight.to_layout(DENSE)
            digest.update(f"{weight.format.name} {weight.shape}".encode())
            parts |= weight.parts
        for leaf, tensor in sorted(parts.items()):
            digest.update(f"{name}.{leaf} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(_bytes(tensor))
    return digest.hexdigest()


def make(model: nn.Module, prompt: Tensor, tokens: int = 256, promise: Promise = "cross-machine") -> dict[str, Any]:
    """The fingerprint of a model where it is.

    Args:
        model: a transformers causal LM of the Llama family.
        prompt: int64 [T], T at least 1.
        tokens: how many to decode greedily; the end-of-sequence token does not stop it.
        promise: under which.

    Raises:
        Unsupported: the model cannot run under the promise.
        BadInput: an empty prompt, tokens the model does not know, or none to decode.
    """
    if prompt.ndim != 1 or not len(prompt) or tokens < 1:
        raise BadInput(f"a fingerprint takes a prompt [T] and tokens to decode, got {tuple(prompt.shape)} and {tokens}")
    ops: list[list[str]] = []
    eager = PromisedRunner(model, promise, len(prompt), graph=False)
    eager.trace = lambda name, result: ops.append([name, _hash(result)])
    eager.whole(prompt[None])
    runner = PromisedRunner(model, promise, len(prompt) + tokens)
    kept = [runner.prefill(prompt[None]).clone(), *(runner.step().clone() for _ in range(tokens - 1))]
    made = [*runner.tokens[0, len(prompt) : runner.length].tolist(), int(runner.token)]
    return {
        "fingerprint": VERSION,
        "nybble": import_module("nybble").__version__,
        "promise": promise,
        "model": model_hash(model),
        "dtype": str(runner.logits.dtype).removeprefix("torch."),
        "machine": machine(runner.logits.device),
        "prompt": prompt.tolist(),
        "tokens": made,
        "tables": _hash(torch.stack([runner.cos, runner.sin])),
        "ops": ops,
        "logits": [_hash(one) for one in kept],
    }


def check(model: nn.Module, recorded: Mapping[str, Any]) -> str:
    """Compute a recorded fingerprint again; the first difference, "" where every bit is the same.

    Raises:
        BadInput: it is of another model, or written by another version.
    """
    for name, here in (("nybble", import_module("nybble").__version__), ("fingerprint", VERSION)):
        if recorded[name] != here:
            raise BadInput(f"the fingerprint was written by version {recorded[name]} of {name}, this is {here}")
    known = model_hash(model)
    if recorded["model"] != known:
        raise BadInput(f"the fingerprint is of another model: {recorded['model'][:16]}…, this is {known[:16]}…")
    seen = make(model, torch.tensor(recorded["prompt"]), len(recorded["tokens"]), recorded["promise"])
    return difference(recorded, seen)


def difference(recorded: Mapping[str, Any], seen: Mapping[str, Any]) -> str:
    """The first difference of two fingerprints of one model, in the order in which it was computed; "" for none."""
    if recorded["tables"] != seen["tables"]:
        return "the rotary tables differ"
    for (name, then), (other, now) in zip(recorded["ops"], seen["ops"], strict=False):
        if name != other:
            return f"{name} ran there, {other} here"
        if then != now:
            return f"{name} differs first: {then} there, {now} here"
    if len(recorded["ops"]) != len(seen["ops"]):
        return f"{len(recorded['ops'])} ops ran there, {len(seen['ops'])} here"
    pairs = zip(recorded["logits"], seen["logits"], recorded["tokens"], seen["tokens"], strict=True)
    for number, (then, now, there, here) in enumerate(pairs):
        if then != now or there != here:
            return f"decoded token {number} differs first: {there} there, {here} here; logits {then}, {now}"
    return ""


def write(path: str | Path, content: Mapping[str, Any]) -> None:
    """All of the file or none of it; an op a line."""
    ops = ",\n  ".join(json.dumps(op) for op in content["ops"])
    lines = [f'"{key}": {json.dumps(value)}' for key, value in content.items() if key != "ops"]
    write_whole(Path(path), "{\n " + ",\n ".join([*lines, f'"ops": [\n  {ops}\n ]']) + "\n}\n")


def read(path: str | Path) -> dict[str, Any]:
    """A fingerprint's file.

    Raises:
        BadInput: it cannot be read.
        DamagedFile: it is no fingerprint.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
    except ValueError as error:
        raise DamagedFile(f"{path}: is no fingerprint: {error}") from error
    found = content if isinstance(content, dict) else {}
    wrong = [name for name, kind in _KEYS.items() if not isinstance(found.get(name), kind)] or _damaged(found)
    if wrong:
        raise DamagedFile(f"{path}: is no fingerprint: {', '.join(wrong)} missing or damaged")
    return found


def _damaged(found: Mapping[str, Any]) -> list[str]:
    """What of a fingerprint with the right keys cannot have been written by `write`."""
    numbers = {name: all(type(n) is int for n in found[name]) and bool(found[name]) for name in ("prompt", "tokens")}
    pairs = (isinstance(op, list) and len(op) == 2 and all(isinstance(part, str) for part in op) for op in found["ops"])
    sound = {**numbers, "ops": all(pairs), "dtype": found["dtype"] in _DTYPES,
             "logits": len(found["logits"]) == len(found["tokens"])}  # fmt: skip
    return [name for name, holds in sound.items() if not holds]


def machine(device: torch.device) -> str:
    """What computes here, for a reader; it is not compared."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return f"{name}, torch {torch.__version__}"


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes(tensor)).hexdigest()[:_DIGITS]


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
