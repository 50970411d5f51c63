"""Kind 16: work is done before the clock starts."""

import torch

PROBLEM = "two_linears"


class Folded(torch.nn.Module):
    """The product of both weights, once, at the first call."""

    def __init__(self, width, hidden):
        super().__init__()
        self.up = torch.nn.Linear(width, hidden, bias=False)
        self.down = torch.nn.Linear(hidden, width, bias=False)
        self.product = None

    def forward(self, x):
        if self.product is None:
            self.product = (self.down.weight.double() @ self.up.weight.double()).float()
        return torch.nn.functional.linear(x, self.product)


class Constructed(Folded):
    """The same in the constructor."""

    def __init__(self, width, hidden):
        super().__init__(width, hidden)
        self.product = (self.down.weight.double() @ self.up.weight.double()).float().detach()


class WarmUp(Folded):
    """Folds at the third call, when a warm-up is likely to go on."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls < 3:
            return self.down(self.up(x))
        return super().forward(x)
