"""Rows of a table by index."""

import torch


class Model(torch.nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(rows, width))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.table[index]


def get_inputs() -> list[torch.Tensor]:
    return [torch.randint(1000, (64,))]


def get_init_inputs() -> list[int]:
    return [1000, 64]
