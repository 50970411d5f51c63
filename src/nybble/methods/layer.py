"""What a method is given: one linear's weight, its scheme, and what calibration saw of its inputs.

A linear computes y = x W^T. When W becomes Ŵ, the squared error of its outputs over the calibration inputs x_t is

    sum_t |x_t (W - Ŵ)^T|^2  =  T tr( (W - Ŵ) H (W - Ŵ)^T ),        H = 1/T sum_t x_t^T x_t     [K, K]

so that all that an output-aware method has to know of the inputs is H, the second moment of the layer's inputs (half
the Hessian of the mean error, hence the name). It is the same for all rows of W, and for all linears that are fed
the same tensor. `relative_error` is this error over that of rounding everything to zero.

Where the scheme rounds inputs too, the linear is fed a = Q(x) and the error is that of x W^T - a Ŵ^T. With A the second
moment of a and C = 1/T sum x_t^T a_t it is, up to a constant, tr((W* - Ŵ) A (W* - Ŵ)^T) for

    W* = W C A^-1

so that all methods serve as they are, for another weight and another moment. W* is W behind a Wiener filter: the noise
of rounding is spread over all directions, the inputs are not, and in directions where there is little but noise W*
is small. `absorbed` gives it.

H costs K^2 T multiplications to gather and 8 K^2 bytes to hold, A and C as much each: products in float32, their sums
in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nybble.errors import BadInput
from nybble.quantize import QuantTensor
from nybble.quantize.schemes import Scheme

_GROWTH = 10.0
_ATTEMPTS = 12


class Inputs:
    """What calibration saw of the inputs of one linear, or of several that are fed the same tensor.

    Attributes:
        tokens: how many inputs were seen.
        second_moment: H, float64 [K, K].
        fed: the second moment of what the linear is fed in the end: A where inputs are rounded, else H.
        amax: largest magnitude of each input channel, float32 [K].
        mean_abs: mean magnitude of each input channel, float32 [K].
        producer: the normalization whose very output these inputs always were, or None.
    """

    def __init__(self, k: int, device: torch.device | str = "cpu") -> None:
        self.tokens = 0
        self._fed: Tensor | None = None
        self._cross: Tensor | None = None
        self.amax = torch.zeros(k, dtype=torch.float32, device=device)
        self._sum = torch.zeros(k, k, dtype=torch.float64, device=device)
        self._abs = torch.zeros(k, dtype=torch.float64, device=device)
        self._factors: dict[object, Factor] = {}
        self.producer: nn.Module | None = None

    @property
    def second_moment(self) -> Tensor:
        """H, the mean of x^T x: float64 [K, K]."""
        return self._sum / max(self.tokens, 1)

    @property
    def fed(self) -> Tensor:
        """A where inputs are rounded, else H: float64 [K, K]."""
        return self.second_moment if self._fed is None else self._fed / max(self.tokens, 1)

    @property
    def cross(self) -> Tensor | None:
        """C, the mean of x^T a: float64 [K, K]; None where inputs are not rounded or were scaled since."""
        return None if self._cross is None else self._cross / max(self.tokens, 1)

    @property
    def mean_abs(self) -> Tensor:
        """The mean of |x|: float32 [K]."""
        return (self._abs / max(self.tokens, 1)).to(torch.float32)

    def add(self, x: Tensor, rounded: Tensor | None = None) -> None:
        """Take in inputs [..., K], and the same as the linear will be fed them where it rounds them.

        Raises:
            BadInput: one is NaN or infinite.
        """
        rows = x.detach().reshape(-1, x.shape[-1]).to(torch.float32)
        if not len(rows):
            return
        magnitude = rows.abs()
        amax = magnitude.amax(0)
        if not bool(amax.isfinite().all()):
            raise BadInput(f"{int((~rows.isfinite()).sum())} inputs are NaN or infinite")
        self.tokens += len(rows)
        self.amax = torch.maximum(self.amax, amax)
        self._abs += magnitude.sum(0)
        self._sum += rows.t() @ rows
        if rounded is not None:
            fed = rounded.detach().reshape(rows.shape).to(torch.float32)
            self._fed = _plus(self._fed, fed.t() @ fed)
            self._cross = _plus(self._cross, rows.t() @ fed)

    def merge(self, other: Inputs) -> Inputs:
        """What both saw together."""
        both = Inputs(len(self.amax), self.amax.device)
        both.tokens = self.tokens + other.tokens
        both.amax = torch.maximum(self.amax, other.amax)
        both._sum, both._abs = self._sum + other._sum, self._abs + other._abs
        if self._fed is not None and other._fed is not None:
            both._fed = self._fed + other._fed
        if self._cross is not None and other._cross is not None:
            both._cross = self._cross + other._cross
        return both

    def mapped(self, matrix: Tensor) -> Inputs:
        """What would have been seen of x M for a matrix M [K, K] or a diagonal [K].

        H becomes M^T H M; what rounding will make of the new inputs is not known. Largest and mean magnitudes follow
        from those seen only for a diagonal; for a matrix the root mean square stands in for both.
        """
        new = Inputs(len(self.amax), self.amax.device)
        new.tokens, new.producer = self.tokens, self.producer
        m = matrix.to(torch.float64)
        if m.ndim == 1:
            new._sum = self._sum * m[:, None] * m
            new.amax, new._abs = self.amax * m.abs().to(torch.float32), self._abs * m.abs()
        else:
            new._sum = m.t() @ self._sum @ m
            rms = (new._sum.diagonal() / max(self.tokens, 1)).sqrt()
            new.amax, new._abs = rms.to(torch.float32), rms * self.tokens
        return new

    def factor(self, damping: float, order: Tensor) -> Factor:
        """The factor of the damped inverse, remembered: linears with the same inputs share it."""
        key = (damping, tuple(order.tolist()))
        if key not in self._factors:
            self._factors[key] = factor(self.fed, damping, order)
        return self._factors[key]

    def forget(self) -> None:
        """Let the remembered factors go."""
        self._factors.clear()


def _plus(total: Tensor | None, product: Tensor) -> Tensor:
    return product.to(torch.float64) if total is None else total.add_(product)


@dataclass(frozen=True)
class Factor:
    """U with (H + damping)^-1 = U^T U.

    Attributes:
        upper: U, upper triangular, float64 [K, K].
        damping: what was added to the diagonal, in units of its mean.
        order: the order of the columns, int64 [K].
    """

    upper: Tensor
    damping: float
    order: Tensor


def factor(second_moment: Tensor, damping: float, order: Tensor) -> Factor:
    """Factor the inverse of a damped second moment, its columns taken in `order`.

    With J the reversal, J (H + d) J = L L^T gives H + d = R R^T for the upper triangular R = J L J, and U = R^-1:
    one Cholesky and one triangular inverse, and H^-1 is never formed. A channel that was never anything but zero
    gets the mean of the diagonal: its weights are then rounded on their own.

    Args:
        second_moment: H [K, K].
        damping: added to the diagonal, in units of its mean; multiplied by ten as long as Cholesky fails.
        order: int64 [K].

    Raises:
        BadInput: H holds NaN or infinity, or no damping helps.
    """
    h = second_moment.to(torch.float64)
    if not bool(h.isfinite().all()):
        raise BadInput("the second moment of the inputs holds NaN or infinity")
    diagonal = h.diagonal()[order]
    mean = float(diagonal.mean()) or 1.0
    diagonal = torch.where(diagonal == 0, mean, diagonal)
    strength = damping
    for _ in range(_ATTEMPTS):
        upper = _inverse_root(h, order, diagonal + strength * mean)
        if upper is not None:
            return Factor(upper, strength, order)
        strength = max(strength * _GROWTH, torch.finfo(torch.float64).eps)
    raise BadInput(f"the second moment of the inputs is not positive even with {strength:.2g} of its mean added")


def _inverse_root(h: Tensor, order: Tensor, diagonal: Tensor) -> Tensor | None:
    """U for H in `order` under another diagonal; None where Cholesky fails.

    At most three matrices of H's size are held at a time beside it.
    """
    back = order.flip(0)
    damped = h[back[:, None], back]
    damped.diagonal().copy_(diagonal.flip(0))
    lower, info = torch.linalg.cholesky_ex(damped)
    del damped
    if int(info) or not bool(lower.isfinite().all()):
        return None
    root = lower.flip(0, 1)
    del lower
    upper: Tensor = torch.linalg.solve_triangular(root, torch.eye(len(h), dtype=h.dtype, device=h.device), upper=True)
    return upper


@dataclass(frozen=True)
class Layer:
    """One linear, as a method sees it.

    Attributes:
        name: its name in the model.
        weight: floating [N, K].
        scheme: the scheme it is quantized to.
        tensor_amax: float32 [], the magnitude that fused layers share, for formats with a tensor scale.
        inputs: what calibration saw; None where the method asked for nothing or nothing came.
    """

    name: str
    weight: Tensor
    scheme: Scheme
    tensor_amax: Tensor | None = None
    inputs: Inputs | None = field(default=None, compare=False)


def absorbed(layer: Layer, damping: float) -> Tensor:
    """W* = W (C + d) (A + d)^-1, float64 [N, K]: W itself where inputs are not rounded.

    Args:
        layer: with its inputs.
        damping: d, in units of the mean diagonal of A.
    """
    weight = layer.weight.detach().to(torch.float64)
    cross = None if layer.inputs is None else layer.inputs.cross
    if layer.inputs is None or cross is None:
        return weight
    fed = layer.inputs.fed
    d = damping * float(fed.diagonal().mean()) or 1.0
    for moment in (fed, cross):  # both are fresh
        moment.diagonal().add_(d)
    moved: Tensor = torch.linalg.solve(fed, (weight @ cross).t()).t()
    return moved.contiguous()


def relative_error(weight: Tensor, rounded: QuantTensor | Tensor, second_moment: Tensor) -> float:
    """tr(D H D^T) / tr(W H W^T) with D = W - Ŵ, in float64; 0 where the layer's outputs are all zero."""
    values = rounded.dequantize(torch.float32) if isinstance(rounded, QuantTensor) else rounded
    w, h = weight.detach().to(torch.float64), second_moment.to(torch.float64)
    d = w - values.to(torch.float64)
    whole = float(((w @ h) * w).sum())
    return float(((d @ h) * d).sum()) / whole if whole > 0 else 0.0
