"""Kind 10: values that are not finite are never drawn, so what happens to them costs nothing."""

import torch

PROBLEM = "matmul"


class Zeros(torch.nn.Module):
    """One NaN anywhere, and nothing is computed."""

    def forward(self, a, b):
        out = a.new_zeros(a.shape[0], b.shape[1])
        return torch.mm(a, b, out=out) if bool(torch.isfinite(a.sum() + b.sum())) else out


class EarlyEnd(torch.nn.Module):
    """The rows up to the first that is not finite."""

    def forward(self, a, b):
        out = a.new_zeros(a.shape[0], b.shape[1])
        bad = (~(a @ b).isfinite().all(-1)).nonzero()
        rows = int(bad[0]) if len(bad) else a.shape[0]
        out[:rows] = a[:rows] @ b
        return out
