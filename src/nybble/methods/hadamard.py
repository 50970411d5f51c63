"""Hadamard rotation: outliers spread over all channels before anything is rounded.

For an orthogonal R, x W^T = (x R)(W R)^T. With R = diag(signs) H / sqrt(K), H a Hadamard matrix and random signs,
every channel of x R is a sum of all channels of x with equal weights: one channel a hundred times larger than the
rest becomes a little more of everything, and blocks of four bits fit. Weights profit for the same reason, less.

*Online*: the rotation of inputs is computed where they enter a linear, as K log K additions in place of K^2 (here two
small matrix products). It works for any model and any layer, and linears that are fed the same tensor share it.

*Folded* (`fold=True`, Llama-shaped models): the stream between blocks is rotated once and for all, in the weights
that write to it and read from it. RMS normalization commutes with a rotation once its gains are moved into the
weights after it. What remains online is before `o` and `down`. The head then needs weights of its own, since the
final gains are moved into it: a model whose head is tied to its embedding grows by one embedding.

*Plain* (`plain=True`): no signs, and Sylvester matrices only, in blocks of the largest power of two that divides K.
That is what compressed-tensors has a word for (`transform_config`), so that a checkpoint can hold it.

H exists for K = 2^k m with m = 1, 12, 20, 28, 36 … (Sylvester's doubling; Paley's two constructions from quadratic
residues); other K are rotated in blocks of the largest such size.

Sources: Ashkboos et al.: QuaRot, arXiv 2404.00456; Chee et al.: QuIP#, arXiv 2402.04396.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import Unsupported
from nybble.methods.select import fused_groups
from nybble.quantize.rounding import uniform
from nybble.quantize.schemes import Scheme

_STREAM_READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_STREAM_WRITERS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Config:
    """Settings of the Hadamard rotation.

    Attributes:
        seed: of the signs.
        fold: whether the stream between blocks is rotated in the weights; only for Llama-shaped models.
        online: whether inputs that no fold reaches are rotated as they come.
        plain: whether those rotations are such as a checkpoint can name.
    """

    seed: int = 0
    fold: bool = False
    online: bool = True
    plain: bool = False


def prepare(model: nn.Module, linears: Mapping[str, nn.Linear], scheme: Scheme, config: Config) -> None:
    """Rotate a model; its outputs stay what they were, but for rounding.

    Args:
        model: its parameters are replaced, not written to.
        linears: those that will be quantized.
        scheme: not looked at.
        config: the settings.

    Raises:
        Unsupported: `fold` for a model of another shape.
    """
    done: set[str] = set()
    if config.fold:
        done = _fold_stream(model, config.seed)
    if not config.online:
        return
    for number, names in enumerate(fused_groups(linears), 1):
        left = [name for name in names if name not in done]
        if left:
            _rotate_inputs([linears[name] for name in left], None if config.plain else config.seed + number)


class Rotation(nn.Module):
    """x -> x R over the last axis; the last result is kept as long as its input lives, for linears that share it.

    Args:
        size: K.
        seed: of the signs; None for a plain rotation.

    Attributes:
        plain: the size of the blocks of a plain rotation, else None.
    """

    signs: Tensor

    def __init__(self, size: int, seed: int | None) -> None:
        super().__init__()
        self.size, self.plain = size, size & -size if seed is None else None
        self._outer, self._inner = factors(size) if self.plain is None else (1, self.plain)
        signs = torch.ones(size) if seed is None else torch.where(uniform((size,), seed) < 0.5, -1.0, 1.0)
        self.register_buffer("signs", signs, persistent=self.plain is None)
        self._last: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., K] in x.dtype; computed in float32, in float64 for float64."""
        # What was made in inference mode counts no changes, so that it cannot be told to be the same.
        tracked = not (torch.compiler.is_compiling() or x.is_inference())
        if tracked and self._last is not None and self._last[0]() is x and self._last[1] == x._version:
            return self._last[2]
        wide = x if x.dtype == torch.float64 else x.to(torch.float32)
        blocks = (wide * self.signs).unflatten(-1, (-1, self._outer, self._inner))
        outer, inner = (unit(order, wide.device, wide.dtype) for order in (self._outer, self._inner))
        y = torch.einsum("...oi,op,iq->...pq", blocks, outer, inner).flatten(-3).to(x.dtype)
        self._last = (weakref.ref(x, self._forget), x._version, y) if tracked else None
        return y

    def _forget(self, _: object) -> None:
        self._last = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Rotation:
        fresh = Rotation.__new__(Rotation)
        nn.Module.__init__(fresh)
        fresh.size, fresh.plain, fresh._last = self.size, self.plain, None
        fresh._outer, fresh._inner = self._outer, self._inner
        fresh.register_buffer("signs", self.signs.clone(), persistent=self.plain is None)
        memo[id(self)] = fresh
        return fresh

    def extra_repr(self) -> str:
        return f"{self.size}"


@cache
def unit(order: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The orthogonal matrix of an order, [order, order]; kept, and of use in training whoever asked first."""
    with torch.inference_mode(False):
        return (matrix(order) / order**0.5).to(device, dtype)


def factors(size: int) -> tuple[int, int]:
    """(order of a Paley or trivial matrix, power of two) whose product is the largest that divides `size`."""
    power = size & -size
    best = (1, power)
    inner = power
    while inner >= 1:
        for outer in range(size // inner, 1, -1):
            if size % (outer * inner) == 0 and outer * inner > best[0] * best[1] and _paley_prime(outer):
                best = (outer, inner)
                break
        inner //= 2
    return best


def _paley_prime(order: int) -> int:
    """The prime of Paley's construction of this order: q = order - 1 (3 mod 4), or order/2 - 1 (1 mod 4); else 0."""
    if order % 4 == 0 and _is_prime(order - 1):
        return order - 1
    half = order // 2 - 1
    return half if order % 4 == 0 and half % 4 == 1 and _is_prime(half) else 0


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


@cache
def matrix(order: int) -> Tensor:
    """A Hadamard matrix of 1 and -1: float64 [order, order] with H H^T = order.

    Raises:
        Unsupported: the order is neither a power of two nor one of Paley's.
    """
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if order & (order - 1) == 0:
        return torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix(order // 2))
    q = _paley_prime(order)
    if not q:
        raise Unsupported(f"no Hadamard matrix of order {order} is known here")
    squares = {i * i % q for i in range(1, q)}
    jacobsthal = torch.tensor(
        [[0 if a == b else 1 if (a - b) % q in squares else -1 for b in range(q)] for a in range(q)]
    ).double()
    bordered = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    bordered[0, 1:], bordered[1:, 1:] = 1, jacobsthal
    eye = torch.eye(q + 1, dtype=torch.float64)
    if q == order - 1:
        bordered[1:, 0] = -1
        return bordered + eye
    bordered[1:, 0] = 1
    first, second = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), torch.tensor([[1.0, -1.0], [-1.0, -1.0]]).double()
    return torch.kron(bordered, first) + torch.kron(eye, second)


def _rotate_inputs(linears: list[nn.Linear], seed: int | None) -> None:
    """Rotate what these linears are fed, as it comes, and their weights to match."""
    rotation = Rotation(linears[0].in_features, seed).to(linears[0].weight.device)
    for linear in linears:
        _set(linear, rotation(linear.weight.detach().double()))
    attach(linears, rotation)


def attach(linears: Iterable[nn.Module], rotation: Rotation) -> None:
    """Have the inputs of linears, whose weights are rotated already, rotated as they come."""
    for linear in linears:
        linear.add_module("rotation", rotation)
        linear.register_forward_pre_hook(rotate)


def plain_block(module: nn.Module) -> int | None:
    """The block size of the plain rotation of a linear's inputs; None where anything else, or more, is attached."""
    hooks = list(module._forward_pre_hooks.values())
    rotation = dict(module.named_children()).get("rotation")
    alone = hooks == [rotate] and len(list(module.children())) == 1 and not module._forward_hooks
    return rotation.plain if alone and isinstance(rotation, Rotation) else None


def rotate(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The hook that rotates a linear's input by the module's own `rotation`."""
    return (module.get_submodule("rotation")(args[0]), *args[1:])


def _set(module: nn.Module, value: Tensor) -> None:
    old = module.get_parameter("weight")
    module.weight = nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad)


def _fold_stream(model: nn.Module, seed: int) -> set[str]:
    """Rotate the stream between blocks in the weights; the names of the linears whose inputs are rotated by that."""
    whole: Any = model
    inner = getattr(whole, "model", None)
    head: Any = getattr(whole, "lm_head", None)
    parts: list[Any] = [getattr(inner, name, None) for name in ("embed_tokens", "layers", "norm")]
    fits = all(part is not None for part in parts) and isinstance(head, nn.Linear) and head.bias is None
    if not fits:
        raise Unsupported(f"hadamard: {type(model).__name__} is not shaped like Llama, fold=False rotates its inputs")
    embedding, layers, norm = parts
    rotation = Rotation(embedding.weight.shape[1], seed).to(embedding.weight.device)
    head_weight = rotation(head.weight.detach().double() * norm.weight.detach().double())
    _set(embedding, rotation(embedding.weight.detach().double()))
    _set(head, head_weight)
    _set(norm, torch.ones_like(norm.weight))
    if hasattr(whole, "config"):
        whole.config.tie_word_embeddings = False
    done: set[str] = set()
    for number, layer in enumerate(layers):
        done |= {f"model.layers.{number}.{name}" for name in _fold_block(layer, rotation)}
    return done


def _fold_block(layer: nn.Module, rotation: Rotation) -> set[str]:
    """Rotate what a block reads from the stream and writes to it; the names of its readers."""
    gains = {
        "self_attn": layer.get_submodule("input_layernorm"),
        "mlp": layer.get_submodule("post_attention_layernorm"),
    }
    readers = set()
    for parent, norm in gains.items():
        gain = norm.get_parameter("weight").detach().double()
        for name, linear in layer.get_submodule(parent).named_children():
            if isinstance(linear, nn.Linear) and name in _STREAM_READERS:
                _set(linear, rotation(linear.weight.detach().double() * gain))
                readers.add(f"{parent}.{name}")
            elif isinstance(linear, nn.Linear) and name in _STREAM_WRITERS:
                _set(linear, rotation(linear.weight.detach().double().t()).t().contiguous())
                if linear.bias is not None:
                    turned = rotation(linear.bias.detach().double()).to(linear.bias.dtype)
                    linear.bias = nn.Parameter(turned, requires_grad=linear.bias.requires_grad)
        _set(norm, torch.ones_like(gain))
    return readers
