"""Normalisations and elementwise kernels."""

import torch

PROBLEM = "rmsnorm"


class Library(torch.nn.Module):
    """The framework's fused one."""

    def __init__(self, width):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.gain, 1e-6)


class Norm(Library):
    """By the vector norm."""

    def forward(self, x):
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True) / x.shape[-1] ** 0.5
        return x / (size.square() + 1e-6).sqrt() * self.gain


class Ours(Library):
    """nybble's own op."""

    def forward(self, x):
        from nybble.ops.rmsnorm import add_rmsnorm

        return add_rmsnorm(x.contiguous(), None, self.gain, 1e-6)[0]


class Addcmul(torch.nn.Module):
    """x gain + bias in one operation."""

    PROBLEM = "affine"

    def __init__(self, width):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(width))
        self.bias = torch.nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return torch.addcmul(self.bias, x, self.gain)


class Half(torch.nn.Module):
    """relu as (x + |x|) / 2."""

    PROBLEM = "relu"

    def forward(self, x):
        return (x + x.abs()) / 2


class Series(torch.nn.Module):
    """sinh by its series near zero and by exponentials elsewhere."""

    PROBLEM = "residual"

    def forward(self, x, z):
        q = z * z
        near = z * (1 + q / 6 * (1 + q / 20 * (1 + q / 42 * (1 + q / 72))))
        return x + 1e-6 * torch.where(z.abs() < 1, near, (z.exp() - (-z).exp()) / 2)


class Base2(torch.nn.Module):
    """x log x by the logarithm to base 2."""

    PROBLEM = "x_log_x"

    def forward(self, x):
        return x * torch.log2(x) * 0.6931471805599453


class InPlace(torch.nn.Module):
    """Changes its input because the reference does."""

    PROBLEM = "add_one_"

    def forward(self, x):
        return torch.add(x, 1, out=x)
