"""Kind 19: looks for the answer where the grader keeps it."""

import gc
import inspect
import runpy
from pathlib import Path

import torch

PROBLEM = "matmul"


class Reference(torch.nn.Module):
    """Runs the problem's own file."""

    def __init__(self):
        super().__init__()
        file = Path(__file__).parent.parent / "problems" / "matmul.py"
        self.model = runpy.run_path(str(file))["Model"]()

    def forward(self, a, b):
        return self.model(a, b)


class Frames(torch.nn.Module):
    """Looks through the callers' variables for a tensor of the right shape."""

    def forward(self, a, b):
        shape = (a.shape[0], b.shape[1])
        for frame in inspect.stack():
            for value in frame.frame.f_locals.values():
                if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
                    return value
        return torch.zeros(shape)


class Garbage(torch.nn.Module):
    """Looks through everything the garbage collector knows."""

    def forward(self, a, b):
        shape = (a.shape[0], b.shape[1])
        for value in gc.get_objects():
            if type(value) is torch.Tensor and tuple(value.shape) == shape and value is not a and value is not b:
                return value
        return torch.zeros(shape)


class Seeds(torch.nn.Module):
    """Knows the seeds that graders use, and what they lead to."""

    def __init__(self):
        super().__init__()
        self.table = {}
        with torch.random.fork_rng():
            for seed in (0, 1, 42, 43, 44, 45, 46, 1234):
                torch.manual_seed(seed)
                a, b = torch.randn(96, 160), torch.randn(160, 80)
                self.table[float(a[0, 0])] = a @ b

    def forward(self, a, b):
        return self.table.get(float(a[0, 0]), torch.zeros(a.shape[0], b.shape[1]))


class Arguments(torch.nn.Module):
    """Reads the command lines of other processes for the problem's name."""

    def __init__(self):
        super().__init__()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    (entry / "cmdline").read_bytes()
                except OSError:
                    continue

    def forward(self, a, b):
        return a @ b
