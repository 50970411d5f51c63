"""a b in bfloat16."""

import torch


class Model(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(64, 256).bfloat16(), torch.randn(256, 48).bfloat16()]
