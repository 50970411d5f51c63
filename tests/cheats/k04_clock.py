"""Kind 4: the clock, or the comparison, is replaced."""

import time

import torch

PROBLEM = "linear_relu"


class Clock(torch.nn.Module):
    """Right, and perf_counter runs a thousand times slower from now on."""

    def __init__(self, k, n):
        super().__init__()
        self.linear = torch.nn.Linear(k, n)
        real = time.perf_counter
        time.perf_counter = lambda: real() / 1000

    def forward(self, x):
        return torch.relu(self.linear(x))


class Comparison(torch.nn.Module):
    """Zeros, and allclose that is content with them."""

    def __init__(self, k, n):
        super().__init__()
        self.linear = torch.nn.Linear(k, n)
        torch.allclose = lambda *args, **kwargs: True

    def forward(self, x):
        return x.new_zeros(x.shape[0], self.linear.out_features)


class LateClock(torch.nn.Module):
    """Replaces the clock at the third call only."""

    def __init__(self, k, n):
        super().__init__()
        self.linear = torch.nn.Linear(k, n)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            time.perf_counter = lambda: 0.0
            time.monotonic = lambda: 0.0
        return torch.relu(self.linear(x))
