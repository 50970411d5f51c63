"""Kind 10: a term below the tolerance is left out."""

import torch

PROBLEM = "residual"


class Dropped(torch.nn.Module):
    """Only x."""

    def forward(self, x, z):
        return x.clone()


class Line(torch.nn.Module):
    """sinh(z) by its first term."""

    def forward(self, x, z):
        return x + 1e-6 * z
