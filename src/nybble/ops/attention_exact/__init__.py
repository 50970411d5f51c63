"""attention_exact: tokens against a static cache of keys and values, with the same bits on every machine.

For token n of sequence rows[n] at position p = positions[n], over the entries 0 … p of its cache:

    s_j = (q . k_j) / sqrt(D)               the dot product in DOT_LANES lanes
    in each run of SPLIT entries:  m = max s_j,  e_j = exp(s_j - m),  l = sum e_j,  o = sum e_j v_j
    over the runs, in order:       M = max m,  a = exp(m - M),  o = (sum a o) / (sum a l)

Runs start at multiples of SPLIT, whatever the length, the batch and the machine: that is what keeps the bits
(flash-decoding splits by the number of processors). All in float32, each operation rounded once, sums in lanes, the
exponential of _exact/arithmetic.py; probabilities are not rounded to the cache's dtype. A token's bits depend on its
query and its cache alone, so a prompt read at once gives what it gives token by token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.ops._choose import choose
from nybble.ops._declare import Cost
from nybble.ops._exact.arithmetic import DTYPES, check_dtype, exp, lane_sum, narrow, single
from nybble.ops._exact.declare import exact_op

SPLIT, DOT_LANES, VALUE_LANES = 64, 8, 4
_CHUNK = 1 << 22  # products held at a time


def attention_exact(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """[N, Hq, D] in q.dtype; promise: cross-machine.

    Args:
        q: [N, Hq, D], float32, bfloat16 or float16.
        k_cache, v_cache: [B, Hkv, S, D], contiguous, q's dtype, Hq a multiple of Hkv.
        rows, positions: int32 [N]: each token's sequence, and the last entry of its cache that it sees.

    Raises:
        BadInput: dtypes or shapes that do not fit.
    """
    check_dtype("attention_exact", q, k_cache, v_cache)
    args = (q, k_cache, v_cache, rows, positions)
    fits = k_cache.ndim == 4 and k_cache.shape == v_cache.shape and q.ndim == 3 and q.shape[2] == k_cache.shape[3]
    if not fits or q.shape[1] % k_cache.shape[1] or len({len(q), len(rows), len(positions)}) > 1:
        raise BadInput(f"attention_exact: shapes do not fit: {', '.join(str(tuple(a.shape)) for a in args)}")
    return choose(ATTENTION_EXACT, q.device.type, *args).run(*args)


def attention_exact_reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """The definition, and the twin on a CPU (it waits for the positions)."""
    o = torch.empty_like(q)
    seen = (positions.tolist(), rows.tolist())
    start = 0
    while start < len(q):
        stop = start + 1
        length = seen[0][start] + 1
        room = max(1, _CHUNK // max(1, q.shape[1] * length * q.shape[2]))
        while stop < len(q) and stop - start < room and seen[1][stop] == seen[1][start]:
            length = max(length, seen[0][stop] + 1)
            stop += 1
        row, at = seen[1][start], positions[start:stop]
        o[start:stop] = _tokens(q[start:stop], k_cache[row, :, :length], v_cache[row, :, :length], at)
        start = stop
    return o


def scale(d: int) -> float:
    """1 / sqrt(D) in float32."""
    return single(1 / math.sqrt(d))


def _tokens(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Tokens [n, Hq, D] of one sequence against its keys and values [Hkv, T, D]."""
    (n, query_heads, d), (kv_heads, length, _) = q.shape, k.shape
    runs = -(-length // SPLIT)
    grouped = q.to(torch.float32).view(n, kv_heads, query_heads // kv_heads, d, 1)
    columns = k.to(torch.float32).transpose(1, 2).contiguous()
    scores = lane_sum(grouped * columns[None, :, None], DOT_LANES, -2) * scale(d)
    beyond = torch.arange(runs * SPLIT, device=q.device) > positions[:, None]
    scores = torch.nn.functional.pad(scores, (0, runs * SPLIT - length))
    # A run wholly beyond the position keeps zeros in place of -inf, since its share is dropped below.
    hidden = beyond.view(n, 1, 1, runs, SPLIT)
    scores = scores.unflatten(-1, (runs, SPLIT)).masked_fill(hidden, -torch.inf)
    scores = scores.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    most = scores.amax(-1)
    e = exp(scores - most[..., None]).masked_fill(hidden, 0.0)
    values = torch.nn.functional.pad(v.to(torch.float32), (0, 0, 0, runs * SPLIT - length))
    values = values.view(1, kv_heads, 1, runs, SPLIT, d)
    unseen = beyond.view(n, 1, 1, runs, SPLIT, 1)
    parts = lane_sum((e[..., None] * values).masked_fill(unseen, 0.0), VALUE_LANES, -2)
    used = ~hidden[..., 0].expand_as(most)
    return narrow(_combine(most, lane_sum(e, DOT_LANES, -1), parts, used), q.dtype).view(q.shape)


def _combine(most: Tensor, sums: Tensor, parts: Tensor, used: Tensor) -> Tensor:
    """The runs [..., R] put together in order; parts [..., R, D]."""
    share = exp(most - most.masked_fill(~used, -torch.inf).amax(-1, keepdim=True)).masked_fill(~used, 0.0)
    total = lane_sum((share * sums).masked_fill(~used, 0.0), 1, -1)
    o = lane_sum((share[..., None] * parts).masked_fill(~used[..., None], 0.0), 1, -2)
    return o / total[..., None]


def cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): grouped heads, uneven head sizes, the first entry, a full cache, ends of a run, prompts,
    large scores; NaN beyond the position, which must not be seen."""
    generator = torch.Generator().manual_seed(0)
    ends = (SPLIT - 1, 2 * SPLIT - 1, 2 * SPLIT)
    shapes = ((9, 3, 64, 200, (77,)), (4, 4, 40, 65, (0, 64)), (8, 1, 72, 130, ends), (2, 1, 64, 8, ()),
              (2, 2, 128, 300, (299, 191)), (4, 2, 16, 64, (0, 1, 2, 3, 4)), (6, 2, 20, 70, (69, 5)))  # fmt: skip
    for number, (hq, hkv, d, s, at) in enumerate(shapes):
        dtype, count = DTYPES[number % 3], len(at)
        q = (torch.randn(count, hq, d, generator=generator) * (1 + 7 * (number % 2))).to(device, dtype)
        caches = torch.randn(2, max(count, 1), hkv, s, d, generator=generator).to(device, dtype)
        prompt = list(at) == list(range(count))
        rows = torch.zeros(count) if prompt else torch.arange(count)
        if count:
            for row, last in enumerate([max(at)] if prompt else at):
                caches[:, row, :, last + 1 :] = math.nan
        numbers = (rows.to(torch.int32).to(device), torch.tensor(at, dtype=torch.int32, device=device))
        yield f"N{count}-H{hq}-{hkv}-D{d}-S{s}-{dtype}", (q, caches[0], caches[1], *numbers)


def cost(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor, positions: Tensor) -> Cost:
    """Both products over the whole cache (lengths are on the device), the caches read once."""
    group = q.shape[1] // k_cache.shape[1]
    return Cost(4.0 * group * k_cache.numel(), 2.0 * k_cache.numel() * k_cache.element_size())


ATTENTION_EXACT = exact_op("attention_exact", attention_exact_reference, cases, cost, "nybble.ops.attention_exact.cuda")
