"""a b for 384 x 384 matrices: long enough to be worth hiding."""

import torch


class Model(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(384, 384), torch.randn(384, 384)]
