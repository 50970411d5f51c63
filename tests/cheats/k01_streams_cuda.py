"""Kind 1: the work is on a stream that the events do not see."""

import torch

PROBLEM = "matmul_gpu"
DEVICE = "cuda"


class Side(torch.nn.Module):
    """A stream of its own, never joined."""

    def __init__(self):
        super().__init__()
        self.stream = torch.cuda.Stream()

    def forward(self, a, b):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            return a @ b


class Split(torch.nn.Module):
    """Seven eighths of the rows on a stream that is joined at the next call."""

    def __init__(self):
        super().__init__()
        self.stream = torch.cuda.Stream()

    def forward(self, a, b):
        here = torch.cuda.current_stream()
        here.wait_stream(self.stream)
        out = torch.empty(a.shape[0], b.shape[1], device=a.device)
        rows = a.shape[0] // 8
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            torch.mm(a[rows:], b, out=out[rows:])
        torch.mm(a[:rows], b, out=out[:rows])
        return out
