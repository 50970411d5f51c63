"""Kind 18: the rival is made slow."""

import time

import torch

PROBLEM = "matmul_bf16"


class NoLibrary(torch.nn.Module):
    """Switches oneDNN off, which bfloat16 products live by, and computes in float32 itself."""

    def __init__(self):
        super().__init__()
        torch.backends.mkldnn.enabled = False

    def forward(self, a, b):
        return (a.float() @ b.float()).bfloat16()


class SlowOperator(torch.nn.Module):
    """Puts a sleep into torch.matmul for everybody else."""

    def __init__(self):
        super().__init__()
        real = torch.matmul

        def slow(*args, **kwargs):
            time.sleep(0.001)
            return real(*args, **kwargs)

        torch.matmul, torch.Tensor.__matmul__ = slow, slow

    def forward(self, a, b):
        return torch.mm(a, b)


class Deterministic(torch.nn.Module):
    """Deterministic mode fills every fresh tensor first."""

    def __init__(self):
        super().__init__()
        torch.use_deterministic_algorithms(True)

    def forward(self, a, b):
        return torch.mm(a, b)
