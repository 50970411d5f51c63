"""GPTQ as the paper writes it, in numpy and float64: the inverse Hessian formed, one column at a time, no blocking.

Independent of nybble.methods: elements come from the exact definition's list of values, by plain search.
"""

import numpy as np

from nybble.formats import array, exact
from nybble.formats.spec import BlockFormat, IntFormat
from nybble.methods.layer import Layer
from nybble.quantize import elements, scales
from nybble.quantize.blocks import cut


def gptq(layer: Layer, damping: float = 0.01) -> np.ndarray:
    """The dequantized weight, float64 [N, K]."""
    fmt, w = layer.scheme.weight, layer.weight.double().numpy().copy()
    h = layer.inputs.second_moment.numpy().copy()
    h += damping * h.diagonal().mean() * np.eye(len(h))
    u = np.linalg.cholesky(np.linalg.inv(h)).T
    width = fmt.block[1] or w.shape[1]
    rule = layer.scheme.rule or fmt.rule
    tensor = scales.tensor_scale(rule, fmt, layer.tensor_amax)
    for j in range(w.shape[1]):
        if j % width == 0:
            scale, zero = _scale(w[:, j : j + width], fmt, rule, tensor)
        q = _nearest(w[:, j], scale, zero, fmt)
        error = (w[:, j] - q) / u[j, j]
        w[:, j:] -= np.outer(error, u[j, j:])
        w[:, j] = q
    return w


def _scale(group: np.ndarray, fmt: BlockFormat, rule: str, tensor: scales.TensorScale | None):
    """(effective scale, zero point) of each row."""
    import torch

    proposal = scales.rule(rule)(cut(torch.tensor(group, dtype=torch.float32), fmt), fmt, tensor)
    effective = elements.decode(fmt.scale, scales.store(proposal.scale, fmt))
    if tensor is not None:
        effective = effective * tensor.decode
    rows = fmt.block[0] or len(group)
    spread = np.repeat(effective.double().numpy()[:, 0], rows)[: len(group)]
    zero = 0.0 if proposal.zero_point is None else proposal.zero_point[:, 0].double().numpy()
    return spread, zero


def _nearest(w: np.ndarray, scale: np.ndarray, zero: np.ndarray | float, fmt: BlockFormat) -> np.ndarray:
    """The nearest value each row can store; stored values are float32 products, as the formats define."""
    if isinstance(fmt.element, IntFormat):
        whole = np.arange(fmt.element.low, fmt.element.high + 1) * 2.0**-fmt.element.fraction_bits
        grid = whole[None] - np.broadcast_to(zero, w.shape)[:, None]
    else:
        values = array.values(fmt.element)
        grid = np.sort(values[np.isfinite(values)])[None].astype(np.float64)
        grid = np.broadcast_to(grid, (len(w), grid.shape[1]))
    nearest = np.abs(w[:, None] / scale[:, None] - grid).argmin(1)
    elements = np.take_along_axis(grid, nearest[:, None], 1)[:, 0].astype(np.float32)
    return (elements * scale.astype(np.float32)).astype(np.float64)


def positive_scales(fmt: BlockFormat) -> list[float]:
    """Every positive finite scale of a small scale format, ascending, by the exact definition."""
    values = [float(exact.decode(fmt.scale, code)) for code in range(fmt.scale.codes)]
    return sorted(v for v in values if np.isfinite(v) and v > 0)
