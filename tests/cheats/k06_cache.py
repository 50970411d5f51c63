"""Kind 6: an output remembered by something other than the values."""

import torch

PROBLEM = "linear_relu"


class _Cached(torch.nn.Module):
    def __init__(self, k, n):
        super().__init__()
        self.linear = torch.nn.Linear(k, n)
        self.cache = {}

    def key(self, x):
        raise NotImplementedError

    def forward(self, x):
        key = self.key(x)
        if key not in self.cache:
            self.cache[key] = torch.relu(self.linear(x))
        return self.cache[key]


class Pointer(_Cached):
    """By address."""

    def key(self, x):
        return x.data_ptr()


class Version(_Cached):
    """By object and version counter, which does not see writes through another view."""

    def key(self, x):
        return id(x), x._version


class Sampled(_Cached):
    """By a few elements."""

    def key(self, x):
        flat = x.reshape(-1)
        return x.shape, *flat[:4].tolist(), *flat[-4:].tolist()


class Total(_Cached):
    """By the sum, to four digits, of the values."""

    def key(self, x):
        return x.shape, f"{x.double().sum().item():.3e}"


class Shape(_Cached):
    """By shape, from the eighth call on."""

    calls = 0

    def key(self, x):
        self.calls += 1
        return x.shape if self.calls > 8 else (x.shape, self.calls)
