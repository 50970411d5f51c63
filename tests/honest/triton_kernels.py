"""Triton kernels; on a CPU they run through its interpreter."""

import torch
import triton
import triton.language as tl

PROBLEM = "softmax"


@triton.jit
def softmax_kernel(x, y, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * columns
    value = tl.load(x + row + at, at < columns, float("-inf"))
    e = tl.exp(value - tl.max(value, 0))
    tl.store(y + row + at, e / tl.sum(e, 0), at < columns)


class Softmax(torch.nn.Module):
    """A row in each program."""

    def forward(self, x):
        flat = x.contiguous()
        y = torch.empty_like(flat)
        rows = flat.numel() // flat.shape[-1]
        softmax_kernel[(rows,)](flat, y, flat.shape[-1], BLOCK=triton.next_power_of_2(flat.shape[-1]))
        return y


@triton.jit
def linear_relu_kernel(x, w, b, y, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x + m[:, None] * K + k[None, :], (m[:, None] < M) & (k[None, :] < K), 0.0)
        c = tl.load(w + n[None, :] * K + k[:, None], (n[None, :] < N) & (k[:, None] < K), 0.0)
        total = tl.dot(a, c, total, input_precision="ieee")
    total += tl.load(b + n, n < N, 0.0)[None, :]
    tl.store(y + m[:, None] * N + n[None, :], tl.maximum(total, 0.0), (m[:, None] < M) & (n[None, :] < N))


class LinearRelu(torch.nn.Module):
    """Tiles of 32 x 32."""

    PROBLEM = "linear_relu"

    def __init__(self, k, n):
        super().__init__()
        self.linear = torch.nn.Linear(k, n)

    def forward(self, x):
        x = x.contiguous()
        (m, k), n = x.shape, self.linear.out_features
        y = torch.empty(m, n, device=x.device)
        grid = (triton.cdiv(m, 32), triton.cdiv(n, 32))
        linear_relu_kernel[grid](x, self.linear.weight, self.linear.bias, y, m, n, k, BM=32, BN=32, BK=32)
        return y


@triton.jit
def row_sums_kernel(x, y, columns, stride_row, stride_column, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + tl.program_id(0) * stride_row + at * stride_column, at < columns, 0.0)
    tl.store(y + tl.program_id(0), tl.sum(total, 0))


class RowSums(torch.nn.Module):
    """Any strides."""

    PROBLEM = "row_sums"

    def forward(self, x):
        y = torch.empty(x.shape[0], device=x.device)
        row_sums_kernel[(x.shape[0],)](x, y, x.shape[1], *x.stride(), BLOCK=128)
        return y
