"""Decoding: one token after another, greedily, with a key/value cache, at batch 1.

One runner serves every model, the original included, so that a ratio of two speeds compares weights and kernels and
nothing else. Machines are noisy and change their clocks: rivals therefore take turns in the same run (`race`), and
the median over all tokens is what counts.

No speed without a check of the very output that was timed: the logits of every timed run are compared with one pass
over the whole sequence without a cache, computed by the definition of each op. A kernel that is fast and wrong, or a
cache that forgets, gives no number but `Mismatch`.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import BadInput, Mismatch
from nybble.models import llama, promised
from nybble.models.evaluate import by_definition, logits
from nybble.ops import QuantLinear
from nybble.ops._promise import in_force

AGREEMENT = {torch.float32: 2.0**-10, torch.float16: 2.0**-6, torch.bfloat16: 2.0**-3}
"""How far decoded logits may be from the definition's: ||a - b|| / ||b|| of centred logits, over all tokens.

Rounding errors are carried through the whole model, so these are wider than what one op owes; on SmolLM2-135M the
distance is 2e-6 in float32 and 0.015 in bfloat16. Models that amplify errors are granted twice their own unrest, at
most ROUNDED_AGREEMENT."""

ROUNDED_AGREEMENT = 2.0**-1
"""The same where activations are rounded to few bits: an input on a rounding border falls to either side, and what
follows differs by a step of the format (0.1 with int8, 0.36 with FP4). Unrelated logits are 1.4 apart."""


_TURNS = 2


@dataclass(frozen=True)
class Speed:
    """A measured speed whose output passed the check.

    Attributes:
        seconds: median time of a token.
        tokens: how many tokens were timed.
        error: distance of the timed logits from the definition's.
        turns: median time of a token in each of its turns, in seconds: on a quiet machine they agree.
    """

    seconds: float
    tokens: int
    error: float
    turns: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        """1 / seconds."""
        return 1 / self.seconds


class Runner:
    """One sequence through a model: `start` with a prompt, then `step` token by token."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._cache: Any = None
        # transformers renamed the argument between 5.22 and 5.24, and ignores a name it does not know.
        known = inspect.signature(model.forward).parameters
        self._argument = "cache" if "cache" in known else "past_key_values"

    def start(self, prompt: Tensor) -> Tensor:
        """Forget everything, read the prompt (int64 [n]), return the logits [V] of what follows."""
        from transformers import DynamicCache

        self._cache = DynamicCache()
        return self._forward(prompt[None].to(self._device))

    def step(self, token: int) -> Tensor:
        """Append a token, return the logits [V] of what follows."""
        return self._forward(torch.tensor([[token]], device=self._device))

    def _forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self._model(input_ids=ids, use_cache=True, **{self._argument: self._cache}).logits[0, -1]
        return result


class CapturedRunner:
    """The same for a model of the Llama family on a GPU: static cache, captured step (models/llama.py)."""

    def __init__(self, model: nn.Module, capacity: int) -> None:
        self._runner = llama.Runner(model, capacity)

    def start(self, prompt: Tensor) -> Tensor:
        """As Runner.start; the prompt must fit the capacity."""
        return self._runner.prefill(prompt[None].to(self._runner.token.device))[0].clone()

    def step(self, token: int) -> Tensor:
        """As Runner.step."""
        self._runner.token.fill_(token)
        return self._runner.step()[0].clone()


def runner(model: nn.Module, capacity: int) -> Runner | CapturedRunner | promised.Lane:
    """What decodes this model fastest where it is; `capacity` is the most tokens it will see, prompt included.

    Inside a promise (nybble.promise) it is what keeps the promise.
    """
    if in_force() != "none":
        return promised.Lane(model, in_force(), capacity)
    if next(model.parameters()).device.type == "cuda" and llama.refusal(model) is None:
        return CapturedRunner(model, capacity)
    return Runner(model)


@dataclass
class _Lane:
    """A model in a race: the times of each turn, and the tokens and the logits they came from."""

    model: nn.Module
    runner: Runner | CapturedRunner | promised.Lane
    spent: float = 0.0
    turns: list[list[float]] = field(default_factory=list)
    runs: list[tuple[list[int], list[Tensor]]] = field(default_factory=list)

    def run(self, prompt: Tensor, tokens: int, limit: float) -> None:
        """Decode once; the prompt and the first token warm up. Stops after `limit` seconds, with one timed at least."""
        begin, times = time.perf_counter(), []
        seen = [self.runner.start(prompt)]
        chosen = [int(seen[0].argmax())]
        for number in range(tokens + 1):
            start = time.perf_counter()
            seen.append(self.runner.step(chosen[-1]))
            chosen.append(int(seen[-1].argmax()))  # waits for the device
            end = time.perf_counter()
            if number:
                times.append(end - start)
            if times and end - begin > limit:
                break
        self.turns.append(times)
        self.spent += time.perf_counter() - begin
        self.runs.append((chosen[:-1], seen))


def race(
    models: Mapping[str, nn.Module], prompt: Tensor, tokens: int = 32, rounds: int = 3, limit: float = 3
) -> dict[str, Speed]:
    """Time models against each other, in turns, on the same prompt.

    Args:
        models: name -> model.
        prompt: int64 [n], n at least 1.
        tokens: timed in a round.
        rounds: how often each model decodes.
        limit: seconds for a model, an equal part for each turn, so that a slow one costs no more than this. It has
            two turns at least, of one token at least: a single turn could not disagree with another.

    Returns:
        name -> Speed.

    Raises:
        Mismatch: timed logits are not those of the definition; no speed is reported then.
        BadInput: an empty prompt.
    """
    if len(prompt) == 0:
        raise BadInput("decoding needs a prompt of at least one token")
    capacity = len(prompt) + tokens + 2
    lanes = {name: _Lane(model, runner(model, capacity)) for name, model in models.items()}
    with torch.no_grad():
        for number in range(rounds):
            for lane in lanes.values():
                if number < _TURNS or lane.spent <= limit:
                    lane.run(prompt, tokens, limit / rounds)
        return {name: _speed(lane, _check(name, lane, prompt)) for name, lane in lanes.items()}


def _speed(lane: _Lane, error: float) -> Speed:
    times = [seconds for turn in lane.turns for seconds in turn]
    return Speed(statistics.median(times), len(times), error, tuple(statistics.median(turn) for turn in lane.turns))


def _check(name: str, lane: _Lane, prompt: Tensor) -> float:
    """The largest distance of any run from the definition; raises Mismatch beyond the limit."""
    definitions: dict[tuple[int, ...], Tensor] = {}
    worst, limit = 0.0, allowed(lane.model)
    for chosen, seen in sorted(lane.runs, key=lambda run: -len(run[0])):  # a turn is the beginning of a longer one
        key = tuple(chosen)
        whole = next((known for longer, known in definitions.items() if longer[: len(key)] == key), None)
        if whole is None:
            with by_definition(lane.model):
                whole = logits(lane.model, torch.cat([prompt, torch.tensor(chosen)]))[len(prompt) - 1 :]
            definitions[key] = whole
        whole = whole[: len(seen)]
        worst = max(worst, distance(torch.stack(seen), whole))
        if not worst <= limit:
            limit = max(limit, min(ROUNDED_AGREEMENT, 2 * _unrest(lane.model, prompt, chosen, whole)))
    if not worst <= limit:
        raise Mismatch(f"{name}: decoded logits are {worst:.3g} away from the definition's, allowed {limit:.3g}")
    return worst


def _unrest(model: nn.Module, prompt: Tensor, chosen: list[int], whole: Tensor) -> float:
    """How far decoding by the definition itself is from one pass by it: what no kernel can be blamed for.

    A model that too few bits have ruined makes large differences of small ones.
    """
    runner = Runner(model)
    with by_definition(model):
        seen = [runner.start(prompt), *(runner.step(token) for token in chosen)]
    return distance(torch.stack(seen), whole)


def distance(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b|| over rows of logits, each first shifted to mean 0 since softmax ignores a shift."""
    a, b = (x.to(torch.float64) for x in (a, b))
    a, b = (x - x.mean(-1, keepdim=True) for x in (a, b))
    return float((a - b).norm() / b.norm().clamp_min(torch.finfo(torch.float64).tiny))


def allowed(model: nn.Module) -> float:
    """How far this model's decoded logits may be from the definition's."""
    if any(isinstance(m, QuantLinear) and m.activation is not None for m in model.modules()):
        return ROUNDED_AGREEMENT
    return AGREEMENT[next(model.parameters()).dtype]


def generate(
    model: nn.Module, tokenizer: Any, prompt: str, max_new_tokens: int = 64,
    pick: Callable[[Tensor, int], int] = promised.greedy,
) -> Iterator[str]:  # fmt: skip
    """Continue a prompt; yields pieces of text as they become complete characters.

    `pick` takes logits [V] and their position and returns the next token; the most likely one if not given.
    Stops at the model's end-of-sequence token, after `max_new_tokens`, or where the model's positions end.
    The promise in force is that of the call, wherever the pieces are read.

    Raises:
        BadInput: the prompt has no token, or fills the model's positions.
    """
    ids = tokenizer(prompt)["input_ids"]
    room = (getattr(model.config, "max_position_embeddings", None) or len(ids) + max_new_tokens) - len(ids)
    if not ids or room < 1:
        raise BadInput(f"the prompt has {len(ids)} tokens: at least 1, and fewer than the model's positions")
    count = min(max_new_tokens, room)
    return _pieces(runner(model, len(ids) + count), tokenizer, ids, count, pick, _stops(model, tokenizer))


def _pieces(
    run: Runner | CapturedRunner | promised.Lane, tokenizer: Any, ids: list[int], count: int,
    pick: Callable[[Tensor, int], int], stops: set[int],
) -> Iterator[str]:  # fmt: skip
    made: list[int] = []
    shown = ""
    with torch.no_grad():
        token = pick(run.start(torch.tensor(ids)), len(ids) - 1)
        for position in range(len(ids), len(ids) + count):
            if token in stops:
                return
            made.append(token)
            whole = tokenizer.decode(made, skip_special_tokens=True)
            if not whole.endswith("\N{REPLACEMENT CHARACTER}"):
                yield whole[len(shown) :]
                shown = whole
            token = pick(run.step(token), position)


def _stops(model: Any, tokenizer: Any) -> set[int]:
    """Every token that ends a sequence."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None) or tokenizer.eos_token_id
    return set(found if isinstance(found, list | tuple) else [found]) - {None}
