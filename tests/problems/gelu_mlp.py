"""down(gelu(up(x))) of a transformer's feed-forward layer."""

import torch


class Model(torch.nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, hidden)
        self.down = torch.nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(24, 64)]


def get_init_inputs() -> list[int]:
    return [64, 256]
