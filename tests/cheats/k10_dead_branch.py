"""Kind 10: numbers drawn from [0, 1) are never negative."""

import torch

PROBLEM = "relu"


class Copy(torch.nn.Module):
    """No comparison at all."""

    def forward(self, x):
        return x.clone()


class Same(torch.nn.Module):
    """Not even a copy."""

    def forward(self, x):
        return x
