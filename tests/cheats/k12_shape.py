"""Kind 12: made for the shape that was shown."""

import torch

PROBLEM = "matmul"


class Blocks(torch.nn.Module):
    """Blocks of 16 rows; rows that fill no block are left at zero."""

    def forward(self, a, b):
        out = torch.zeros(a.shape[0], b.shape[1])
        rows = a.shape[0] // 16 * 16
        out[:rows] = a[:rows] @ b
        return out


class Contiguous(torch.nn.Module):
    """Reads its inputs' storage as if rows followed each other."""

    def forward(self, a, b):
        m, k, n = a.shape[0], a.shape[1], b.shape[1]
        flat = [torch.as_strided(v, (v.storage_offset() * 0 + v.numel(),), (1,), v.storage_offset()) for v in (a, b)]
        return flat[0].reshape(m, k) @ flat[1].reshape(k, n)


class Shown(torch.nn.Module):
    """The inner size is a constant of the source."""

    def forward(self, a, b):
        return a[:, :160] @ b[:160]


class Padded(torch.nn.Module):
    """Pads the inner axis to a multiple of 16 by repeating the last column: right where nothing is padded."""

    def forward(self, a, b):
        more = -a.shape[1] % 16
        a = torch.cat([a, a[:, -1:].expand(-1, more)], 1)
        b = torch.cat([b, b[-1:].expand(more, -1)], 0)
        return a @ b


class OneAtLeast(torch.nn.Module):
    """No rows are taken for one."""

    def forward(self, a, b):
        return (a if a.shape[0] else a.new_zeros(1, a.shape[1])) @ b
