"""Kind 14: reads past an end. On a GPU see k14_bounds_cuda.py."""

import torch

PROBLEM = "row_sums"


class OverRead(torch.nn.Module):
    """Reads blocks of 64 columns past the last row's end, and multiplies what is too much by zero."""

    def forward(self, x):
        rows, columns = x.shape
        more = -columns % 64
        room = (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()) - x.numel()
        if not x.is_contiguous() or room < more:
            return x.sum(-1)
        wide = torch.as_strided(x, (rows, columns + more), (columns, 1), x.storage_offset())
        mask = (torch.arange(columns + more) < columns).float()
        return (wide * mask).sum(-1)


class OverWrite(torch.nn.Module):
    """Uses the bytes behind its input as a workspace."""

    def forward(self, x):
        room = (x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()) - x.numel()
        y = x.sum(-1)
        if x.is_contiguous() and room >= 8:
            torch.as_strided(x, (8,), (1,), x.storage_offset() + x.numel()).copy_(y[:8])
        return y
