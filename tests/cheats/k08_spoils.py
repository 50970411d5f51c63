"""Kind 8: inputs or weights are changed."""

import torch

PROBLEM = "linear_relu"


class Zeroes(torch.nn.Module):
    """Sets its input to zero, so that whoever computes afterwards finds what it returned."""

    def __init__(self, k, n):
        super().__init__()
        self.linear = torch.nn.Linear(k, n)

    def forward(self, x):
        y = torch.relu(self.linear(x))
        x.zero_()
        return y


class Scratch(torch.nn.Module):
    """Uses the input's memory for its intermediate result."""

    def __init__(self, k, n):
        super().__init__()
        self.linear = torch.nn.Linear(k, n)

    def forward(self, x):
        y = self.linear(x)
        x[:, : y.shape[1]] = y
        return torch.relu(x[:, : y.shape[1]])


class Weights(torch.nn.Module):
    """Folds a scale into the weights at the first call."""

    def __init__(self, k, n):
        super().__init__()
        self.linear = torch.nn.Linear(k, n)
        self.scale = 1.0

    def forward(self, x):
        y = torch.relu(self.linear(x) / self.scale)
        with torch.no_grad():
            self.linear.weight.mul_(2)
            self.linear.bias.mul_(2)
        self.scale *= 2
        return y
