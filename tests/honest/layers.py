"""Layers of several parts, and a product of bfloat16."""

import math

import torch

PROBLEM = "gelu_mlp"


class Erf(torch.nn.Module):
    """gelu by its definition."""

    def __init__(self, width, hidden):
        super().__init__()
        self.up = torch.nn.Linear(width, hidden)
        self.down = torch.nn.Linear(hidden, width)

    def forward(self, x):
        h = self.up(x)
        return self.down(0.5 * h * (1 + torch.erf(h / math.sqrt(2))))


class FoldedEachCall(torch.nn.Module):
    """The product of both weights, made anew at each call: algebra that is paid for."""

    PROBLEM = "two_linears"

    def __init__(self, width, hidden):
        super().__init__()
        self.up = torch.nn.Linear(width, hidden, bias=False)
        self.down = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x @ (self.down.weight @ self.up.weight).t()


class Select(torch.nn.Module):
    """Rows of a table by index_select."""

    PROBLEM = "embedding"

    def __init__(self, rows, width):
        super().__init__()
        self.table = torch.nn.Parameter(torch.empty(rows, width))

    def forward(self, index):
        return self.table.index_select(0, index.reshape(-1)).reshape(*index.shape, -1)


class FoldedNorm(torch.nn.Module):
    """Batch normalisation folded into the convolution at each call."""

    PROBLEM = "batchnorm_conv"

    def __init__(self, channels, outputs):
        super().__init__()
        self.conv = torch.nn.Conv2d(channels, outputs, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(outputs)

    def forward(self, x):
        scale = self.norm.weight * torch.rsqrt(self.norm.running_var + self.norm.eps)
        bias = (self.conv.bias - self.norm.running_mean) * scale + self.norm.bias
        return torch.nn.functional.conv2d(x, self.conv.weight * scale[:, None, None, None], bias, padding=1)


class LowerOnly(torch.nn.Module):
    """Leaves out the blocks above the diagonal, which the problem says are zero."""

    PROBLEM = "triangular"

    def forward(self, a, b):
        step = 32
        return torch.cat([a[i : i + step, : i + step] @ b[: i + step] for i in range(0, a.shape[0], step)])


class WideSums(torch.nn.Module):
    """bfloat16 inputs, float32 sums, one rounding."""

    PROBLEM = "matmul_bf16"

    def forward(self, a, b):
        return (a.float() @ b.float()).bfloat16()


class TwoHalves(torch.nn.Module):
    """Two float32 partial sums, one rounding."""

    PROBLEM = "matmul_bf16"

    def forward(self, a, b):
        k = a.shape[1] // 2
        return (a[:, :k].float() @ b[:k].float() + a[:, k:].float() @ b[k:].float()).bfloat16()
