"""QuantLinear: the module that takes an nn.Linear's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nybble.formats.spec import BlockFormat
from nybble.ops._choose import choose
from nybble.quantize import QuantTensor
from nybble.quantize.layouts import DENSE


class QuantLinear(nn.Module):
    """y = x W^T + bias with a quantized weight; no gradient flows to the weight.

    The weight's parts are buffers, so that moving and saving the module works as usual; converting its dtype
    (`.half()`, `.to(torch.bfloat16)`) leaves them as they are, since their dtypes belong to the format.

    Args:
        weight: QuantTensor [N, K].
        bias: parameter [N] or None.
        activation: the format inputs are rounded to, or None.
        activation_amax: float32 [], the calibrated input magnitude for activation formats with a tensor scale.
    """

    _PARTS = ("codes", "scale", "tensor_scale", "zero_point")
    activation_amax: Tensor | None

    def __init__(
        self,
        weight: QuantTensor,
        bias: nn.Parameter | None = None,
        activation: BlockFormat | None = None,
        activation_amax: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.activation = activation
        for name in self._PARTS:
            self.register_buffer(name, getattr(weight, name))
        self.register_buffer("activation_amax", activation_amax)
        self.bias = bias
        self._weight = weight

    @property
    def weight(self) -> QuantTensor:
        """The quantized weight."""
        return self._weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N] in x.dtype."""
        from nybble.ops.linear import linear

        return linear(x, self._weight, self.bias, self.activation, self.activation_amax)

    def prepare(self, dtype: torch.dtype) -> QuantLinear:
        """Bring the weight into the layout that this machine's implementation for inputs of `dtype` wants, once."""
        from nybble.ops.linear import LINEAR

        probe = torch.empty((1, self.in_features), dtype=dtype, device=self._weight.device)
        args = (probe, self._weight, self.bias, self.activation, self.activation_amax)
        wanted = choose(LINEAR, probe.device.type, *args).layout(self._weight)
        self.set_weight(self._weight.to_layout(wanted or DENSE))
        return self

    def set_weight(self, weight: QuantTensor) -> None:
        """Replace the weight by one of the same logical shape."""
        for name in self._PARTS:
            setattr(self, name, getattr(weight, name))
        self._weight = weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            if after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        self._refresh()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._refresh()

    def _refresh(self) -> None:
        """Rebuild the weight from buffers that were replaced."""
        old = self._weight
        parts = {name: getattr(self, name) for name in self._PARTS}
        self._weight = QuantTensor(old.format, old.shape, layout=old.layout, dtype=old.dtype, **parts)

    def extra_repr(self) -> str:
        rounded = f", activation={self.activation.name}" if self.activation else ""
        return f"{self.in_features}, {self.out_features}, {self._weight.format.name}{rounded}"
