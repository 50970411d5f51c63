"""Kind 11: fewer bits than were asked for."""

import torch

PROBLEM = "matmul"


class Bfloat16(torch.nn.Module):
    """Products of bfloat16."""

    def forward(self, a, b):
        return (a.bfloat16() @ b.bfloat16()).float()


class TensorFloat(torch.nn.Module):
    """Inputs cut to eleven bits, as TF32 does, sums in float32."""

    @staticmethod
    def cut(x):
        return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    def forward(self, a, b):
        return self.cut(a) @ self.cut(b)


class HalfSums(torch.nn.Module):
    """float32 products, partial sums kept in float16."""

    def forward(self, a, b):
        out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16)
        for k in range(0, a.shape[1], 32):
            out += (a[:, k : k + 32] @ b[k : k + 32]).half()
        return out.float()


class OneLost(torch.nn.Module):
    """The last of the inner axis is left out."""

    def forward(self, a, b):
        return a[:, :-1] @ b[:-1] if a.shape[1] > 1 else a @ b
