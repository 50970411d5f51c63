"""Quantization-aware distillation: train the weights that will be rounded, with rounding in place, on the original.

Rounding after the fact cannot do better than the nearest point it finds for given weights; training moves the weights
so that their *rounded* values serve. Student and teacher are the same model, the teacher unrounded and frozen. In the
student every linear computes with exactly what will be stored and, unless told otherwise, with the inputs it will be
given,

    y = Q_a(x) Q_w(W)^T        Q_w: codes and scales of the scheme, dequantized;  Q_a: the scheme's activation format

in the model's own dtype. Rounding has no useful gradient; the straight-through estimate takes that of the
dequantized product for W and x as if Q were the identity. The loss is the forward KL divergence to the teacher, the
mean over tokens of

    sum_v p(v) log( p(v) / q(v) ),        p = softmax(teacher), q = softmax(student)

and only the linears' weights learn. With `rank`, W = W0 + B A of that rank learns instead: optimizer state and
gradients then are those of A and B, and the merged weight is rounded on the fly.

Master weights are float32. After the last step they are rounded by rtn, on the same path as in training, so that the
codes written are those that were simulated. Scales over a tensor are shared among fused projections as everywhere.
Activation scales of formats with two levels are measured on each call while training.

A step costs about three forward passes more than the teacher's one, and one rounding of every weight; memory is that
of training: 16 bytes a weight beyond the model (master, gradient, two moments), or those of A and B and one layer's
gradient.

Source: Xu et al.: QATFactory, arXiv 2609.39223; the estimator: Bengio et al., arXiv 1308.3432.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import BadInput
from nybble.formats.spec import BlockFormat
from nybble.methods import memory, rtn
from nybble.methods.calibrate import Batch, call
from nybble.methods.layer import Layer
from nybble.methods.select import fused_groups
from nybble.methods.work import Work
from nybble.ops.quantize_rows import quantize_rows
from nybble.quantize import QuantTensor
from nybble.quantize.rounding import uniform
from nybble.quantize.schemes import Scheme

NEEDS_BATCHES = True
_SMALL_RANK = 16  # what is offered where whole weights do not fit


@dataclass(frozen=True)
class Config:
    """Settings of distillation.

    Attributes:
        steps: how many batches are trained on; the calibration is gone through again and again.
        lr: AdamW's learning rate, reached after `warmup` steps and decaying to zero along a cosine.
        warmup: steps.
        rank: of B A; 0 trains whole weights.
        weights_only: whether inputs are left as they are although the scheme rounds them.
        seed: of the order of batches and of A.
    """

    steps: int = 200
    lr: float = 1e-5
    warmup: int = 10
    rank: int = 0
    weights_only: bool = False
    seed: int = 0


class Trained:
    """The trainable weight of one linear.

    Attributes:
        parameters: what the optimizer moves: the master weight, or A and B.
    """

    def __init__(self, linear: nn.Linear, rank: int, seed: int) -> None:
        self.dtype = linear.weight.dtype
        self._start = linear.weight.detach()
        if not rank:
            self.parameters = [self._start.to(torch.float32).clone().requires_grad_()]
            return
        n, k = linear.weight.shape
        a = ((uniform((rank, k), seed) * 2 - 1) / k**0.5).to(linear.weight.device)
        b = torch.zeros(n, rank, device=linear.weight.device)
        self.parameters = [a.requires_grad_(), b.requires_grad_()]

    def weight(self) -> Tensor:
        """The weight as it is now, in the model's dtype: what is rounded."""
        if len(self.parameters) == 1:
            return self.parameters[0].to(self.dtype)
        a, b = self.parameters
        return torch.addmm(self._start.to(torch.float32), b, a).to(self.dtype)


class _Straight(torch.autograd.Function):
    """Gives the second argument, and hands its gradient to the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded` in the forward pass, the identity on x in the backward pass."""
    result: Tensor = _Straight.apply(x, rounded)
    return result


def fit(
    model: nn.Module, linears: Mapping[str, nn.Linear], scheme: Scheme, batches: Sequence[Batch], config: Config,
    progress: Callable[[int, int, str], None] | None = None, work: Work | None = None,
) -> list[float]:  # fmt: skip
    """Train the linears' weights; they are replaced, not written to.

    Args:
        model: the model; it gives logits, or an output that holds them.
        linears: those that will be quantized.
        scheme: what they will be quantized to.
        batches: what is trained on.
        config: the settings.
        progress: called with (steps done, steps in all, the loss in words) after each step.
        work: where what was reached is kept after every tenth of the steps, so that a run that was stopped goes on.

    Returns:
        The loss of every step, nats a token.

    Raises:
        BadInput: a loss is not finite, settings are out of range, or there is not enough memory (what would fit is
            said).
    """
    if config.steps < 1 or config.rank < 0 or config.lr <= 0:
        raise BadInput(
            f"distill: steps {config.steps} and lr {config.lr} must be positive, rank {config.rank} at least 0"
        )
    _check_room(linears, config)
    teacher = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    trained = {name: Trained(linear, config.rank, config.seed + i) for i, (name, linear) in enumerate(linears.items())}
    activation = None if config.weights_only else scheme.activation
    course = _Course([p for one in trained.values() for p in one.parameters], config, work)
    simulated = replace(scheme, activation=activation)
    for batch in islice(_order(batches, config), len(course.losses), None):
        with torch.no_grad():
            target = _logits(call(teacher, batch))
        with torch.enable_grad():
            with simulating(linears, trained, simulated):
                loss = divergence(target, _logits(call(model, batch)))
            course.step(loss)
        if progress is not None:
            progress(len(course.losses), config.steps, f"distill: {course.losses[-1]:.4f} nats")
    for name, linear in linears.items():
        linear.weight = nn.Parameter(trained[name].weight().detach(), requires_grad=linear.weight.requires_grad)
    return course.losses


def _check_room(linears: Mapping[str, nn.Linear], config: Config) -> None:
    """Refuse a training that cannot fit, before a step is made."""
    need, other = (training_bytes(linears, rank) for rank in (config.rank, _SMALL_RANK))
    device = next(iter(linears.values())).weight.device
    have = memory.free(device)
    if need > have:
        fits = f"rank={_SMALL_RANK} would train a correction in {memory.gb(other)}" if other < have else "no rank fits"
        raise BadInput(
            f"distill: not enough memory: {memory.gb(need)} are needed beside the model and its activations, and "
            f"{device} has {memory.gb(have)}: {fits}"
        )


def training_bytes(linears: Mapping[str, nn.Linear], rank: int) -> int:
    """What training holds for the weights: of each parameter itself, its gradient and two moments in float32; and
    every weight as rounded, in its own dtype, which the backward pass needs."""
    weights = [linear.weight for linear in linears.values()]
    trained = sum(rank * sum(w.shape) if rank else w.numel() for w in weights)
    return 16 * trained + sum(w.nbytes for w in weights)


class _Course:
    """What moves the parameters, and how far it has come.

    Attributes:
        losses: of the steps so far.
    """

    def __init__(self, parameters: list[Tensor], config: Config, work: Work | None) -> None:
        self._parameters, self._config, self._work = parameters, config, work
        self._optimizer = torch.optim.AdamW(parameters, lr=config.lr, weight_decay=0.0)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: _rate(step, config))
        self.losses: list[float] = []
        kept = None if work is None else work.state()
        if kept is not None:
            for parameter, value in zip(parameters, kept["parameters"], strict=True):
                parameter.data.copy_(value)
            self._optimizer.load_state_dict(kept["optimizer"])
            self._schedule.load_state_dict(kept["schedule"])
            self.losses = kept["losses"]

    def step(self, loss: Tensor) -> None:
        """Follow the gradient of a loss."""
        self.losses.append(float(loss.detach()))
        done = len(self.losses)
        if not torch.isfinite(loss.detach()):
            raise BadInput(f"distill: the loss is {self.losses[-1]} at step {done}: a smaller lr may help")
        # Only what trains gets a gradient: other parameters may be shared with the original.
        for parameter, gradient in zip(self._parameters, torch.autograd.grad(loss, self._parameters), strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        self._schedule.step()
        every = max(1, self._config.steps // 10)
        if self._work is not None and (done % every == 0 or done == self._config.steps):
            self._work.keep(done, self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "parameters": [parameter.detach() for parameter in self._parameters],
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "losses": self.losses,
        }


@contextmanager
def simulating(linears: Mapping[str, nn.Linear], trained: Mapping[str, Trained], scheme: Scheme) -> Iterator[None]:
    """Within this context the linears compute with rounded inputs, and with their weights as rounded when it began."""
    try:
        for names in fused_groups(linears):
            weights = [trained[name].weight() for name in names]
            fed = _Fed(scheme.activation, len(names))
            for name, weight, rounded in zip(names, weights, _rounded(names, weights, scheme), strict=True):
                used = straight_through(weight, rounded)
                linears[name].__dict__["forward"] = _Simulated(used, linears[name].bias, fed)
        yield
    finally:
        for linear in linears.values():
            linear.__dict__.pop("forward", None)


@dataclass(frozen=True)
class _Simulated:
    """A linear's forward pass while training: its weight as rounded, and what rounds its inputs."""

    weight: Tensor
    bias: Tensor | None
    fed: _Fed

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(self.fed(x), self.weight, self.bias)


class _Fed:
    """Rounds inputs; projections that are fed the same tensor get one rounding of it.

    Args:
        activation: the format, or None.
        readers: how many linears share this; once all have read a tensor, it is let go.
    """

    def __init__(self, activation: BlockFormat | None, readers: int) -> None:
        self._activation, self._readers, self._left = activation, readers, 0
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._activation is None:
            return x
        if self._last is None or self._last[0] is not x:
            self._last, self._left = (x, _round_input(x, self._activation)), self._readers
        rounded, self._left = self._last[1], self._left - 1
        if not self._left:
            self._last = None
        return rounded


@torch.no_grad()
def _rounded(names: Sequence[str], weights: Sequence[Tensor], scheme: Scheme) -> list[Tensor]:
    """Fused weights as they will be stored, dequantized: rtn's codes, by the op that writes them in one pass where the
    scheme's rule is the format's own and scales lie within rows."""
    fmt = scheme.weight
    amax = torch.stack([w.abs().amax().to(torch.float32) for w in weights]).amax() if fmt.tensor_scale else None
    found: list[QuantTensor] = []
    for name, weight in zip(names, weights, strict=True):
        if fmt.block[0] == 1 and scheme.rule in (None, fmt.rule):
            found.append(quantize_rows(_narrow(weight), fmt, tensor_amax=amax))
        else:
            found.append(rtn.apply(Layer(name, weight, scheme, amax), rtn.Config()))
    return [q.dequantize(weight.dtype) for q, weight in zip(found, weights, strict=True)]


def _round_input(x: Tensor, activation: BlockFormat) -> Tensor:
    with torch.no_grad():
        tokens = _narrow(x.reshape(-1, x.shape[-1]))
        amax = tokens.abs().amax().to(torch.float32) if activation.tensor_scale else None
        rounded = quantize_rows(tokens, activation, tensor_amax=amax).dequantize(x.dtype).view(x.shape)
    return straight_through(x, rounded)


def _narrow(x: Tensor) -> Tensor:
    """float64 as float32, which quantizing begins with."""
    return x.to(torch.float32) if x.dtype == torch.float64 else x


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """The mean over tokens of KL(teacher || student) of logits [..., V], in float32."""
    p, q = (z.to(torch.float32).log_softmax(-1) for z in (teacher, student))
    return (p.exp() * (p - q)).sum(-1).mean()


def _logits(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise BadInput(f"distill needs a model that gives logits, got {type(output).__name__}")
    return found


def _rate(step: int, config: Config) -> float:
    if step < config.warmup:
        return (step + 1) / (config.warmup + 1)
    through = (step - config.warmup) / max(config.steps - config.warmup, 1)
    return 0.5 * (1 + float(torch.cos(torch.tensor(through * torch.pi))))


def _order(batches: Sequence[Batch], config: Config) -> Iterator[Batch]:
    """Batches for all steps: each pass over them in another order."""
    for step in range(config.steps):
        at = step % len(batches)
        if at == 0:
            order = uniform((len(batches),), config.seed + step).argsort().tolist()
        yield batches[order[at]]
