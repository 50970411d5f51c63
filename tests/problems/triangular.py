"""The product of a lower triangular matrix with a vector for each column; a kernel may rely on the zeros."""

import torch


class Model(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(96, 96).tril(), torch.randn(96, 40)]
