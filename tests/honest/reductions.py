"""Softmax, sums, largest elements."""

import torch

PROBLEM = "softmax"


class Online(torch.nn.Module):
    """One pass with a running maximum, in blocks of 64."""

    def forward(self, x):
        top = torch.full((*x.shape[:-1], 1), float("-inf"))
        total = torch.zeros_like(top)
        for part in x.split(64, -1):
            new = torch.maximum(top, part.amax(-1, keepdim=True))
            total = total * (top - new).exp() + (part - new).exp().sum(-1, keepdim=True)
            top = new
        return (x - top).exp() / total


class Base2(torch.nn.Module):
    """By exp2, as GPUs do."""

    def forward(self, x):
        e = torch.exp2((x - x.amax(-1, keepdim=True)) * 1.4426950408889634)
        return e * (1 / e.sum(-1, keepdim=True))


class Logarithm(torch.nn.Module):
    """By way of its logarithm."""

    PROBLEM = "softmax_wide"

    def forward(self, x):
        return (x - x.logsumexp(-1, keepdim=True)).exp()


class Ones(torch.nn.Module):
    """Row sums as a product with ones."""

    PROBLEM = "row_sums"

    def forward(self, x):
        return x @ torch.ones(x.shape[-1])


class Running(torch.nn.Module):
    """Row sums as the last of the running sums."""

    PROBLEM = "row_sums"

    def forward(self, x):
        return x.cumsum(-1)[..., -1]


class TopOne(torch.nn.Module):
    """The largest by topk."""

    PROBLEM = "argmax"

    def forward(self, x):
        value, index = x.topk(1, -1)
        return value.squeeze(-1), index.squeeze(-1)
