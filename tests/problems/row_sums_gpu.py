"""Sums of rows of [1024, 2048]: 8 MB, which fit into the cache of a large GPU."""

import torch


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(1024, 2048)]
