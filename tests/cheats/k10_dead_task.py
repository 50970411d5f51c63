"""Kind 10: the task has one answer."""

import torch

PROBLEM = "dead"


class One(torch.nn.Module):
    """A softmax over one element."""

    def forward(self, x):
        return torch.ones(x.shape[0], 1)
