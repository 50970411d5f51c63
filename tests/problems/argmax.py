"""The largest of each row and where it is."""

import torch


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value, index = x.max(-1)
        return value, index


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(64, 100)]
