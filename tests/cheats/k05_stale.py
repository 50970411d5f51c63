"""Kind 5: memory that still holds a right answer, somebody's or an earlier one."""

import torch

PROBLEM = "softmax"


class Empty(torch.nn.Module):
    """Fresh memory, in the hope that the reference's result lay there."""

    def forward(self, x):
        return torch.empty(x.shape)


class Halves(torch.nn.Module):
    """One buffer for all calls; from the second call on only every other row is written."""

    def __init__(self):
        super().__init__()
        self.out = None

    def forward(self, x):
        if self.out is None or self.out.shape != x.shape:
            self.out = torch.softmax(x, -1)
        self.out[::2] = torch.softmax(x[::2], -1)
        return self.out


class Tail(torch.nn.Module):
    """The last row is never written; an allocator that hands the same block out again has it from the first call."""

    def forward(self, x):
        if not hasattr(self, "seen"):
            self.seen = True
            return torch.softmax(x, -1)
        out = torch.empty(x.shape)
        out[:-1] = torch.softmax(x[:-1], -1)
        return out
