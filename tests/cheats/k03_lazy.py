"""Kind 3: what is returned computes when it is looked at."""

import torch

PROBLEM = "linear_relu"


class LazyTensor(torch.Tensor):
    """Holds the inputs; any operation on it computes first."""

    @staticmethod
    def __new__(cls, work, shape):
        made = torch.Tensor._make_subclass(cls, torch.zeros(shape))
        made.work = work
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        done = [a.work() if isinstance(a, LazyTensor) and hasattr(a, "work") else a for a in args]
        with torch._C.DisableTorchFunctionSubclass():
            return func(*done, **(kwargs or {}))


class Subclass(torch.nn.Module):
    """A tensor subclass with __torch_function__."""

    def __init__(self, k, n):
        super().__init__()
        self.linear = torch.nn.Linear(k, n)

    def forward(self, x):
        return LazyTensor(lambda: torch.relu(self.linear(x)), (x.shape[0], self.linear.out_features))


class Dispatching(torch.Tensor):
    """The same one level lower."""

    @staticmethod
    def __new__(cls, work, shape):
        made = torch.Tensor._make_wrapper_subclass(cls, shape)
        made.work = work
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        done = [a.work() if isinstance(a, Dispatching) else a for a in args]
        return func(*done, **(kwargs or {}))


class Wrapper(Subclass):
    """A wrapper subclass without memory of its own."""

    def forward(self, x):
        return Dispatching(lambda: torch.relu(self.linear(x)), (x.shape[0], self.linear.out_features))
