"""x + 1 in place: the reference changes its input, and so must a candidate."""

import torch


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(32, 64)]
