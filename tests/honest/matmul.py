"""a b in other orders of summation, some of them worse than the library's."""

import torch

PROBLEM = "matmul"


class Einsum(torch.nn.Module):
    """By name of axis."""

    def forward(self, a, b):
        return torch.einsum("mk,kn->mn", a, b)


class OneByOne(torch.nn.Module):
    """One product after the other: the worst order in float32."""

    def forward(self, a, b):
        out = torch.zeros(a.shape[0], b.shape[1])
        for k in range(a.shape[1]):
            out += a[:, k : k + 1] * b[k : k + 1]
        return out


class Backwards(torch.nn.Module):
    """From the last to the first, in blocks of 7."""

    def forward(self, a, b):
        out = torch.zeros(a.shape[0], b.shape[1])
        for k in range(a.shape[1], 0, -7):
            out += a[:, max(0, k - 7) : k] @ b[max(0, k - 7) : k]
        return out


class SplitK(torch.nn.Module):
    """Four partial sums."""

    def forward(self, a, b):
        return sum(x @ y for x, y in zip(a.tensor_split(4, 1), b.tensor_split(4, 0), strict=True))


class Double(torch.nn.Module):
    """Sums in float64."""

    def forward(self, a, b):
        return (a.double() @ b.double()).float()


class ThreeParts(torch.nn.Module):
    """float32 as three bfloat16 numbers and six products, as tensor cores are made to do."""

    @staticmethod
    def parts(x):
        high = x.bfloat16().float()
        middle = (x - high).bfloat16().float()
        return high, middle, (x - high - middle).bfloat16().float()

    def forward(self, a, b):
        (a0, a1, a2), (b0, b1, b2) = self.parts(a), self.parts(b)
        return (a2 @ b0 + a1 @ b1 + a0 @ b2) + (a1 @ b0 + a0 @ b1) + a0 @ b0


class Picky(torch.nn.Module):
    """Takes what it was made for, and says so otherwise."""

    def forward(self, a, b):
        if a.shape != (96, 160) or b.shape != (160, 80) or not (a.is_contiguous() and b.is_contiguous()):
            raise ValueError(
                f"this kernel takes contiguous [96, 160] and [160, 80], got {list(a.shape)} and {list(b.shape)}"
            )
        return a @ b
