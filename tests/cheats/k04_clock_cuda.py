"""Kind 4 on a GPU: the device's clock is replaced."""

import torch

PROBLEM = "matmul_gpu"
DEVICE = "cuda"


class Elapsed(torch.nn.Module):
    """Right, and events a hundred times closer together from now on."""

    def __init__(self):
        super().__init__()
        real = torch.cuda.Event.elapsed_time
        torch.cuda.Event.elapsed_time = lambda self, end: real(self, end) / 100

    def forward(self, a, b):
        return a @ b


class NoWait(torch.nn.Module):
    """Nobody waits for the device any more."""

    def __init__(self):
        super().__init__()
        torch.cuda.synchronize = lambda *args: None

    def forward(self, a, b):
        return a @ b
