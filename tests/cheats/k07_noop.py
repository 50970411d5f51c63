"""Kind 7: right while it is watched, nothing later."""

import torch

PROBLEM = "matmul"


class After(torch.nn.Module):
    """Computes ten times."""

    calls, out = 0, None

    def forward(self, a, b):
        self.calls += 1
        if self.calls <= 10 or self.out.shape != (a.shape[0], b.shape[1]):
            self.out = a @ b
        return self.out


class Third(torch.nn.Module):
    """Every third call after the first hundred returns the last result."""

    calls, out = 0, None

    def forward(self, a, b):
        self.calls += 1
        if self.calls < 100 or self.calls % 3 or self.out.shape != (a.shape[0], b.shape[1]):
            self.out = a @ b
        return self.out


class Hurry(torch.nn.Module):
    """Computes only when the last call was long ago: a timing loop is not."""

    last, quick, out = 0.0, 0, None

    def forward(self, a, b):
        import time

        now = time.monotonic()
        self.quick = self.quick + 1 if now - self.last < 5e-4 else 0
        if self.quick < 2 or self.out.shape != (a.shape[0], b.shape[1]):
            self.out = a @ b
        self.last = time.monotonic()
        return self.out


class Repeats(torch.nn.Module):
    """Skips the work when it sees the same address a third time."""

    def __init__(self):
        super().__init__()
        self.seen, self.out = {}, {}

    def forward(self, a, b):
        key = a.data_ptr()
        self.seen[key] = self.seen.get(key, 0) + 1
        if self.seen[key] < 3 or self.out[key].shape != (a.shape[0], b.shape[1]):
            self.out[key] = a @ b
        return self.out[key]
