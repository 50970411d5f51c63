"""softmax over 16384 classes of numbers in [0, 1): every result is near 6e-5, below the usual tolerance."""

import torch


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, dim=-1)


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(8, 16384)]
