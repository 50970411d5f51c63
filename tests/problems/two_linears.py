"""Two linears with nothing between them."""

import torch


class Model(torch.nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, hidden, bias=False)
        self.down = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(16, 48)]


def get_init_inputs() -> list[int]:
    return [48, 192]
