"""Kind 9: a constant, or a mean, near enough for a fixed tolerance."""

import torch

PROBLEM = "softmax_wide"


class Zero(torch.nn.Module):
    """Every result is below 1e-4."""

    def forward(self, x):
        return torch.zeros_like(x)


class Uniform(torch.nn.Module):
    """The mean of a softmax is known."""

    def forward(self, x):
        return torch.full_like(x, 1 / x.shape[-1])


class OneRow(torch.nn.Module):
    """The normaliser of the first row serves all."""

    def forward(self, x):
        return x.exp() / x[:1].exp().sum(-1, keepdim=True)


class Linearised(torch.nn.Module):
    """A first-order formula round the middle of the range."""

    def forward(self, x):
        y = 1 + (x - 0.5) + (x - 0.5) ** 2 / 2
        return y / y.sum(-1, keepdim=True)
