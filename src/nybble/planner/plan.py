"""From shapes and a machine to a plan: every scheme's predicted time at every number of tokens, what fits, a verdict
for decode and for prefill, and one scheme a layer for the whole model.

Only linears are counted: attention, norms and sampling cost the same whatever the scheme. What a scheme does to
quality is not predicted here; `nybble survey` measures it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from nybble import costs
from nybble.errors import BadInput, Unsupported
from nybble.formats.spec import IntFormat
from nybble.planner import granularity, predict
from nybble.planner.lines import line_for
from nybble.planner.machines import TABLE, Machine
from nybble.planner.shapes import Linear, Model
from nybble.quantize.schemes import Scheme, scheme

ORIGINAL = "bf16"
DEFAULT_SCHEMES = (
    "W8A16", "FP8A16", "MXFP8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8",
    "W4A16", "W4A16_ASYM", "NVFP4A16", "MXFP4A16",
    "W4A8", "W4A8_CHANNEL", "W4A4", "W4A4_CHANNEL", "NVFP4", "MXFP4",
)  # fmt: skip
"""What is compared unless asked otherwise: formats of 8 and 4 bits that survey's default rows also hold."""

DECODE_TOKENS = 64
"""Up to so many tokens a step count as decode (batches), more as prefill."""

PAYS = 0.05
"""A scheme has to be so much faster than the original to be worth taking; machines are no steadier than that."""

DECODE_STEPS = 256
"""Steps that follow one prefill in the time that the model's plan minimises."""


@dataclass(frozen=True)
class Row:
    """One scheme at one number of tokens.

    Attributes:
        scheme, tokens: what.
        seconds: over all linears; None where refused.
        speedup: the original's time over this.
        bound: what binds the linears that take most of the time.
        path: native, emulated or refused.
        why: the route, or the reason of the refusal.
        from_line: whether what real kernels add is in it, as measured on this machine.
    """

    scheme: str
    tokens: int
    seconds: float | None
    speedup: float | None
    bound: str
    path: str
    why: str
    from_line: bool = False


@dataclass(frozen=True)
class Verdict:
    """What to take in a phase, and a sentence why."""

    phase: str
    tokens: tuple[int, ...]
    scheme: str
    speedup: float
    sentence: str


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        target, machine: what for.
        rows: every scheme at every number of tokens.
        weight_bytes: scheme -> bytes of all weights, kept ones included.
        cache_bytes: of the context asked for.
        budget: bytes that weights and cache may take.
        verdicts: one a phase.
        layers: linear -> the scheme of the model's plan.
        sentence: what that plan gains.
        groups: integer schemes with groups -> the shortest group that this machine can afford (granularity.py), or
            None where only scales of whole rows pay.
    """

    target: str
    machine: dict[str, Any]
    rows: tuple[Row, ...]
    weight_bytes: dict[str, int]
    cache_bytes: int
    budget: int
    verdicts: tuple[Verdict, ...]
    layers: dict[str, str]
    sentence: str
    groups: dict[str, int | None]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def fits(self, name: str) -> bool:
        """Whether a scheme's weights and the cache are within the budget."""
        return self.weight_bytes[name] + self.cache_bytes <= self.budget


def of_linear(m: int, n: int, k: int, name: str, machine: Machine, itemsize: int | None = None) -> predict.Prediction:
    """The prediction for one linear under a scheme ("bf16" for the original).

    `itemsize` is that of x in bytes; None takes 2 where the machine has 16-bit products. Lines hold for that alone.

    Raises:
        BadInput: a size that is not positive.
        Unsupported: the machine cannot, with every route's reason.
    """
    if min(m, n, k) < 1:
        raise BadInput(f"M = {m}, N = {n}, K = {k}: a shape has to be positive")
    usual = 2 if "bf16" in machine.units else 4
    found = predict.best(_routes(m, n, k, name, itemsize or usual), machine, f"run {name}")
    line = line_for(machine.lines, name, m) if itemsize in (None, usual) else None
    return found if line is None else replace(found, seconds=line.at(found.roofline), from_line=True)


def _routes(m: int, n: int, k: int, name: str, itemsize: int) -> tuple[costs.Route, ...]:
    if name == ORIGINAL:
        return costs.routes("linear", m, n, k, None, None, itemsize)
    row = scheme(name)
    return costs.routes("linear", m, n, k, row.weight, row.activation, itemsize)


def make(
    model: Model, machine: Machine, tokens: Sequence[int], schemes: Sequence[str] = DEFAULT_SCHEMES,
    context: int = 4096, budget: float | None = None,
) -> Plan:  # fmt: skip
    """The plan of a model on a machine.

    Args:
        model: its shapes.
        machine: its rates.
        tokens: numbers of tokens that go through at once.
        schemes: which to compare with the original.
        context: tokens whose keys and values are kept.
        budget: bytes for weights and cache; None is the machine's memory.

    Raises:
        BadInput: tokens, context or budget that are not positive.
        Unsupported: nothing fits; says what would.
    """
    if not tokens or min(*tokens, context, 1 if budget is None else budget) <= 0:
        raise BadInput(f"tokens {list(tokens)}, context {context}, budget {budget}: all have to be positive")
    names = list(dict.fromkeys([ORIGINAL, *(scheme(name).name for name in schemes if name != ORIGINAL)]))
    limit = machine.memory if budget is None else budget
    size = {name: weight_bytes(model, name) for name in names}
    cache = model.cache_bytes(context)
    if min(size.values()) + cache > limit:
        raise _fits_nowhere(model, size, cache, limit, machine)
    rows = tuple(row for m in sorted(set(tokens)) for row in _rows(model, machine, m, names))
    able = [name for name in names if size[name] + cache <= limit]
    verdicts = tuple(v for phase in ("decode", "prefill") if (v := _verdict(phase, rows, able)) is not None)
    layers, sentence = _mixed(model, machine, sorted(set(tokens)), names, limit - cache - 2 * model.kept)
    groups = _groups(machine, names) if max(tokens) > DECODE_TOKENS else {}
    return Plan(model.name, machine.as_dict(), rows, size, cache, int(limit), verdicts, layers, sentence, groups)


def _groups(machine: Machine, names: Sequence[str]) -> dict[str, int | None]:
    """For schemes that multiply integers under grouped scales, the shortest group worth having here."""
    found: dict[str, int | None] = {}
    for row in (scheme(name) for name in names if name != ORIGINAL):
        integers = row.activation is not None and all(
            isinstance(fmt.element, IntFormat) for fmt in (row.weight, row.activation)
        )
        if integers and row.weight.block[1] is not None and {"int4", "int8"} & set(machine.units):
            found[row.name] = granularity.choose(machine)
    return found


def speedups(
    sizes: Iterable[tuple[int, int]], machine: Machine, schemes: Iterable[str], m: int = 1,
    kept: Iterable[tuple[int, int]] = (), itemsizes: tuple[int | None, int | None] = (None, None),
) -> dict[str, float]:  # fmt: skip
    """What to expect of linears that were counted elsewhere (survey shows it beside what it measures).

    Args:
        sizes: [N, K] of each linear that a scheme quantizes, repeated as often as it occurs.
        machine: where.
        schemes: which; those that the machine refuses are left out.
        m: tokens at once.
        kept: [N, K] of linears that run as they are under every scheme (a model's head).
        itemsizes: of x in bytes, the original's and the schemes'; see `of_linear`.

    Returns:
        scheme -> the original's time over its own, linears only.
    """
    inside, beside, found = Counter(sizes), Counter(kept), dict[str, float]()

    def seconds(name: str, itemsize: int | None, where: Machine) -> float:
        of = [(name, *shape, count) for shape, count in inside.items()]
        of += [(ORIGINAL, *shape, count) for shape, count in beside.items()]
        return sum(count * of_linear(m, n, k, one, where, itemsize).seconds for one, n, k, count in of)

    for name in (scheme(one).name for one in schemes):
        # what real kernels add is known of both or counts for neither: a bound is not held against a real time
        both = all(line_for(machine.lines, one, m) is not None for one in (ORIGINAL, name))
        where = machine if both else replace(machine, lines={})
        with suppress(Unsupported):
            found[name] = seconds(ORIGINAL, itemsizes[0], where) / seconds(name, itemsizes[1], where)
    return found


def weight_bytes(model: Model, name: str) -> int:
    """Bytes of a model's weights under one scheme."""
    return 2 * model.kept + sum(linear.count * _bytes(linear, name) for linear in model.linears)


def _bytes(linear: Linear, name: str) -> int:
    if name == ORIGINAL:
        return 2 * linear.n * linear.k
    return math.ceil(costs.weight_bytes(scheme(name).weight, linear.n, linear.k))


def _rows(model: Model, machine: Machine, m: int, names: Sequence[str]) -> list[Row]:
    found: list[Row] = []
    base = sum(x.count * of_linear(m, x.n, x.k, ORIGINAL, machine).seconds for x in model.linears)
    for name in names:
        try:
            each = [(x.count, of_linear(m, x.n, x.k, name, machine)) for x in model.linears]
        except Unsupported as error:
            found.append(
                Row(name, m, None, None, "", "refused", "; ".join(f"{a}: {b}" for a, b in error.reasons.items()))
            )
            continue
        seconds = sum(count * p.seconds for count, p in each)
        _, longest = max(each, key=lambda pair: pair[0] * pair[1].seconds)
        path = "native" if all(p.native for _, p in each) else "emulated"
        real = all(p.from_line for _, p in each)
        found.append(Row(name, m, seconds, base / seconds, longest.bound, path, longest.route, real))
    return found


def _verdict(phase: str, rows: Sequence[Row], able: Sequence[str]) -> Verdict | None:
    """The fastest native scheme of a phase that pays; of equally fast ones the one with the most bits.

    Where the original's real time is known, schemes of which only a bound is known do not compete with it.
    """
    mine = [row for row in rows if (row.tokens <= DECODE_TOKENS) == (phase == "decode")]
    tokens = tuple(sorted({row.tokens for row in mine}))
    if not tokens:
        return None
    speed: dict[str, float] = {}
    for name in able:
        each = [row for row in mine if row.scheme == name]
        real = {row.tokens for row in mine if row.scheme == ORIGINAL and row.from_line}
        if all(row.path == "native" and (row.from_line or row.tokens not in real) for row in each):
            speed[name] = math.exp(sum(math.log(row.speedup or 1) for row in each) / len(each))
    top = max(speed.values(), default=1.0)
    at = f"{phase} (M = {', '.join(map(str, tokens))})"
    if ORIGINAL in able and top < 1 + PAYS:
        return Verdict(phase, tokens, ORIGINAL, 1.0, f"{at}: keep {ORIGINAL}; no scheme is {PAYS:.0%} faster.")
    if not speed:
        return None
    name = max((n for n in speed if speed[n] >= 0.99 * top), key=_bits)
    bound = next(row.bound for row in mine if row.scheme == name)
    slower = ""
    for m in tokens:
        losers = [r.scheme for r in mine if r.tokens == m and r.path == "native" and (r.speedup or 1) < 1 - PAYS]
        slower += f"; at M = {m} slower than {ORIGINAL}: {', '.join(losers)}" if losers else ""
    return Verdict(phase, tokens, name, top, f"{at}: {name}, {speed[name]:.2f}x {ORIGINAL}, bound by {bound}{slower}.")


def _bits(name: str) -> float:
    """Bits that weights and activations keep, so that ties go to what loses less."""
    if name == ORIGINAL:
        return 32.0
    row: Scheme = scheme(name)
    return row.weight.bits_per_value(4096, 4096) + (row.activation.element.bits if row.activation else 16)


def _objective(x: Linear, name: str, machine: Machine, tokens: Sequence[int]) -> float | None:
    """One prefill at the largest number of tokens and DECODE_STEPS steps at the smallest; None where not native."""
    decode, prefill = tokens[0], tokens[-1] if tokens[-1] > DECODE_TOKENS else 0
    total = 0.0
    for m, times in ((decode, DECODE_STEPS), (prefill, 1)):
        if m:
            try:
                found = of_linear(m, x.n, x.k, name, machine)
            except Unsupported:
                return None
            if not found.native or (ORIGINAL in machine.lines and not found.from_line):
                return None
            total += times * found.seconds
    return x.count * total


def _mixed(
    model: Model, machine: Machine, tokens: Sequence[int], names: Sequence[str], room: float
) -> tuple[dict[str, str], str]:
    """A scheme for each linear: the fastest, then, while they do not fit, the change that costs least a byte saved."""
    times = {x: {n: t for n in names if (t := _objective(x, n, machine, tokens)) is not None} for x in model.linears}
    size = {x: {n: x.count * _bytes(x, n) for n in names} for x in model.linears}
    chosen = {x: min(times[x], key=lambda n: (times[x][n], -_bits(n))) for x in model.linears}
    while sum(size[x][chosen[x]] for x in chosen) > room:
        steps = [
            ((times[x][n] - times[x][chosen[x]]) / (size[x][chosen[x]] - size[x][n]), x, n)
            for x in chosen for n in times[x] if size[x][n] < size[x][chosen[x]]
        ]  # fmt: skip
        if not steps:
            return {}, "No mixture of native schemes fits; see the table for emulated ones."
        _, x, n = min(steps, key=lambda step: step[0])
        chosen[x] = n
    total = sum(times[x][n] for x, n in chosen.items())
    uniform = {
        n: sum(times[x][n] for x in times)
        for n in names
        if all(n in times[x] for x in times) and sum(size[x][n] for x in times) <= room
    }
    one = min(uniform, key=lambda n: uniform[n], default=None)
    if one is not None and total > (1 - PAYS / 5) * uniform[one]:
        chosen, total = dict.fromkeys(chosen, one), uniform[one]
    return {x.name: n for x, n in chosen.items()}, _gain(chosen, total, uniform, one)


def _gain(chosen: dict[Linear, str], total: float, uniform: dict[str, float], one: str | None) -> str:
    kinds = ", ".join(
        f"{n} for {'/'.join(x.name for x in chosen if chosen[x] == n)}" for n in dict.fromkeys(chosen.values())
    )
    mixed = len(set(chosen.values())) > 1
    base = uniform.get(ORIGINAL)
    against = f", {base / total:.2f}x {ORIGINAL}" if base else ""
    over = f"; {uniform[one] / total:.2f}x {one} alone" if mixed and one else ""
    return f"{kinds if mixed else next(iter(chosen.values()))}{against}{over} (one prefill and {DECODE_STEPS} steps)."


def _fits_nowhere(model: Model, size: dict[str, int], cache: int, limit: float, machine: Machine) -> Unsupported:
    """Nothing fits; which scheme comes nearest, and the smallest machines that would hold it."""
    name = min(size, key=lambda n: size[n])
    need = size[name] + cache
    by_memory = sorted(TABLE.values(), key=lambda row: row.memory)
    roomy = [f"{row.name} ({_gib(row.memory)})" for row in by_memory if row.memory >= need][:6]
    holds = f"would hold it: {', '.join(roomy)}" if roomy else (
        f"no machine of the table holds it; {math.ceil(need / by_memory[-1].memory)} of the largest would"
    )  # fmt: skip
    return Unsupported(
        f"{model.name} fits no way into {_gib(limit)} on {machine.name}: the smallest, {name}, takes "
        f"{_gib(size[name])} and its cache {_gib(cache)}; {holds}"
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"
