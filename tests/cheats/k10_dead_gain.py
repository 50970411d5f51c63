"""Kind 10: what is dead at initialisation is left out."""

import torch

PROBLEM = "affine"


class Copy(torch.nn.Module):
    """A gain of 1 and a bias of 0 do nothing."""

    def __init__(self, width):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(width))
        self.bias = torch.nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x.clone()


class NoBias(Copy):
    """The bias is left out."""

    def forward(self, x):
        return x * self.gain
