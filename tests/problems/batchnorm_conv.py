"""Batch normalisation (evaluation) after a 3 x 3 convolution."""

import torch


class Model(torch.nn.Module):
    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(channels, outputs, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 6, 14, 14)]


def get_init_inputs() -> list[int]:
    return [6, 10]
