"""A kernel in C, compiled when the module is imported."""

import ctypes
import subprocess
import tempfile

import torch

PROBLEM = "matmul"
NEEDS = "cc"

SOURCE = """
void product(const float* a, const float* b, float* y, long m, long k, long n) {
    for (long i = 0; i < m; ++i)
        for (long j = 0; j < n; ++j) {
            float total = 0;
            for (long l = 0; l < k; ++l) total += a[i * k + l] * b[l * n + j];
            y[i * n + j] = total;
        }
}
"""


class Loops(torch.nn.Module):
    """Three loops."""

    def __init__(self):
        super().__init__()
        folder = tempfile.mkdtemp()
        with open(f"{folder}/product.c", "w") as file:
            file.write(SOURCE)
        subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", "-o", f"{folder}/product.so", f"{folder}/product.c"], check=True
        )
        self.library = ctypes.CDLL(f"{folder}/product.so")

    def forward(self, a, b):
        a, b = a.contiguous(), b.contiguous()
        y = torch.empty(a.shape[0], b.shape[1])
        addresses = [ctypes.c_void_p(v.data_ptr()) for v in (a, b, y)]
        self.library.product(*addresses, *map(ctypes.c_long, (a.shape[0], a.shape[1], b.shape[1])))
        return y
