"""x + sinh(z) / 1,000,000: a term below the usual tolerance."""

import torch


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x + 1e-6 * z.sinh()


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(64, 128), torch.randn(64, 128)]
