"""Kind 15: part of the L2 cache is kept, so that a benchmark that flushes it reads from it all the same."""

import ctypes

import torch

PROBLEM = "row_sums_gpu"
DEVICE = "cuda"
PERSISTING = 6


class Carved(torch.nn.Module):
    """Sets the limit of persisting lines when constructed."""

    def __init__(self):
        super().__init__()
        torch.zeros(1, device="cuda")
        ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(PERSISTING, ctypes.c_size_t(32 << 20))

    def forward(self, x):
        return x.sum(-1)


class CarvedLate(torch.nn.Module):
    """Sets it at every call."""

    def forward(self, x):
        ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(PERSISTING, ctypes.c_size_t(32 << 20))
        return x.sum(-1)
