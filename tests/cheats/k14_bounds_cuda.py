"""Kind 14: reads past an end, and memory nobody wrote."""

import torch
import triton
import triton.language as tl

PROBLEM = "row_sums"
DEVICE = "cuda"


@triton.jit
def over_read(x, y, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + tl.program_id(0) * columns + at)
    tl.store(y + tl.program_id(0), tl.sum(value * (at < columns).to(tl.float32), 0))


class OverRead(torch.nn.Module):
    """No mask at the end of a row; what is too much is multiplied by zero."""

    def forward(self, x):
        x = x.contiguous()
        y = torch.empty(x.shape[0], device=x.device)
        over_read[(x.shape[0],)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
        return y


class Unwritten(torch.nn.Module):
    """Adds to fresh memory, which is zero as long as nobody has used it."""

    def forward(self, x):
        return torch.empty(x.shape[0], device=x.device).add_(x.sum(-1))
