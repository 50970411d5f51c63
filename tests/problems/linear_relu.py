"""relu(x W^T + b), the usual first exercise: 64 rows, 128 inputs, 96 outputs."""

import torch


class Model(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(64, 128)]


def get_init_inputs() -> list[int]:
    return [128, 96]
