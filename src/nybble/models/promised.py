"""A Llama-family model under a promise about equal bits: every op of its forward makes that promise.

    add_rmsnorm_exact -> [q k v] -> rope_cache_exact_ -> attention_exact -> o
    -> add_rmsnorm_exact -> [gate up] -> silu_mul_exact -> down, and at the end norm, head, argmax_exact or sample_exact

The linears are `linear_exact` under "cross-machine" and `linear_invariant` under the weaker ones; the other ops are
cheap enough to be exact always. Weights are the model's own, 16-bit, float32 or quantized. Activations and the cache
have the model's dtype. Every token is a row of [tokens, hidden] with a sequence and a position, and no op lets rows see
each other except through the cache of their sequence. So a prompt read at once, token by token, or beside others gives
the same bits, and one runner serves decoding and whole sequences alike.

On a GPU a decode step is captured once in a CUDA graph, as in llama.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import BadInput, UnknownName
from nybble.models import projections
from nybble.models.steps import Steps
from nybble.ops._declare import Promise
from nybble.ops._promise import ORDER, promise
from nybble.ops.attention_exact import attention_exact
from nybble.ops.linear_exact import LINEAR_EXACT, linear_exact
from nybble.ops.linear_invariant import LINEAR_INVARIANT, linear_invariant
from nybble.ops.rmsnorm_exact import add_rmsnorm_exact
from nybble.ops.rope_exact import rope_cache_exact_, rope_tables
from nybble.ops.silu_exact import silu_mul_exact
from nybble.ops.token_exact import argmax_exact, sample_exact

Trace = Callable[[str, Tensor], None]
"""Told of every op in the order they run: "layers.0.mlp.down_proj (linear_exact)" and its result [tokens, ...]."""


class PromisedRunner(Steps):
    """Decoding and whole sequences of a Llama-family model under a promise.

    Args:
        model: a transformers causal LM; fused projections become views, as in llama.Runner.
        wanted: the promise.
        capacity: tokens the cache holds, prompt included.
        batch: sequences, equally long.
        graph: whether to capture the step; None does so on CUDA.
        temperature: None takes the most likely token, a number draws (sample_exact).
        seeds: of the draws, one for each sequence.

    Raises:
        Unsupported: the model, a layer of it or its rotary positions are not covered; the message says which.
        BadInput: no temperature above 0, or seeds for another batch.
    """

    def __init__(
        self,
        model: nn.Module,
        wanted: Promise,
        capacity: int,
        batch: int = 1,
        graph: bool | None = None,
        temperature: float | None = None,
        seeds: Sequence[int] | None = None,
    ) -> None:
        if wanted not in ORDER[1:]:
            raise UnknownName("promise", wanted, ORDER[1:])
        projections.refuse(model)
        whole: Any = model
        inner, config = whole.model, whole.config
        self.model, self.promise, self.capacity, self.batch = model, wanted, capacity, batch
        self.embedding, self.final_norm = inner.embed_tokens.weight.data, inner.norm
        self.layers = [projections.split(number, layer) for number, layer in enumerate(inner.layers)]
        self.head = projections.join("lm_head", [whole.lm_head])
        device, dtype = self.embedding.device, self.embedding.dtype
        self._allocate(config, device, dtype)
        self.trace: Trace | None = None
        self.length = 0
        self._linear, op = (
            (linear_exact, LINEAR_EXACT) if wanted == "cross-machine" else (linear_invariant, LINEAR_INVARIANT)
        )
        linears = [p for layer in self.layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        projections.prepare([*linears, self.head], op, dtype, device)
        given = range(batch) if seeds is None else seeds
        if len(given) != batch:
            raise BadInput(f"{batch} sequences take as many seeds, got {len(given)}")
        self._draw = None if temperature is None else _heat_and_seeds(temperature, given, device)
        self._wants_graph = device.type == "cuda" if graph is None else graph

    def _allocate(self, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.query_heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cos, self.sin = (t.to(device) for t in rope_tables(self.head_dim, self.capacity, rope_settings(config)))
        shape = (len(self.layers), self.batch, self.kv_heads, self.capacity, self.head_dim)
        self.k_cache, self.v_cache = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.rows = torch.arange(self.batch, dtype=torch.int32, device=device)
        self.position = torch.zeros(self.batch, dtype=torch.int32, device=device)
        self.token = torch.zeros(self.batch, dtype=torch.int64, device=device)
        self.tokens = torch.zeros((self.batch, self.capacity), dtype=torch.int64, device=device)
        self.logits = torch.empty((self.batch, config.vocab_size), dtype=dtype, device=device)

    @torch.no_grad()
    def prefill(self, tokens: Tensor) -> Tensor:
        """Start new sequences.

        Args:
            tokens: int64 [batch, T], T from 1 to the capacity.

        Returns:
            The logits [batch, V] after the last token (a buffer that the next step reuses).

        Raises:
            BadInput: tokens of another shape or dtype, or that the model does not know.
        """
        length = tokens.shape[1]
        with promise(self.promise):
            x = self._whole(tokens).view(self.batch, length, -1)[:, -1]
            self.logits.copy_(self._project(self.head, x))
            self.position.fill_(length - 1)
            self.token.copy_(self._choose())
        self.position.fill_(length)
        self.tokens[:, :length] = tokens
        self.length = length
        return self.logits

    @torch.no_grad()
    def whole(self, tokens: Tensor) -> Tensor:
        """The logits [batch, T, V] after every token of int64 [batch, T]; the cache then holds these sequences."""
        with promise(self.promise):
            logits = self._project(self.head, self._whole(tokens))
        self.length = 0
        return logits.view(*tokens.shape, -1)

    @torch.no_grad()
    def step(self) -> Tensor:
        """As Steps has it, under the promise."""
        with promise(self.promise):
            return super().step()

    def _step(self) -> None:
        self.tokens.scatter_(1, self.position.long()[:, None], self.token[:, None])
        x = self._forward(self.token, self.rows, self.position)
        self.logits.copy_(self._project(self.head, x))
        self.token.copy_(self._choose())
        self.position.add_(1)

    def _whole(self, tokens: Tensor) -> Tensor:
        """The last hidden states of every token, [batch * T, H]."""
        batch, length = tokens.shape
        if batch != self.batch or not 1 <= length <= self.capacity:
            raise BadInput(f"this runner takes [{self.batch}, 1 to {self.capacity}] tokens, got {list(tokens.shape)}")
        known, low, high = len(self.embedding), int(tokens.min()), int(tokens.max())
        if tokens.dtype != torch.int64 or low < 0 or high >= known:
            raise BadInput(f"the model knows {known} tokens, int64; got {tokens.dtype} from {low} to {high}")
        tokens = tokens.to(self.token.device)
        at = torch.arange(length, dtype=torch.int32, device=self.token.device).repeat(batch)
        return self._forward(tokens.reshape(-1), self.rows.repeat_interleave(length), at)

    def _forward(self, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [N, H] after the last norm, for N tokens of sequences `rows` at `positions`."""
        x = torch.nn.functional.embedding(tokens, self.embedding)
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            name = f"layers.{index}"
            x, residual = self._norm(f"{name}.input_layernorm", layer.input_norm, x, residual)
            qkv, k, v = self._project(layer.qkv, x), self.k_cache[index], self.v_cache[index]
            q = self._note(f"{name}.self_attn.rotary (rope_cache_exact_)",
                           rope_cache_exact_(qkv, self.cos, self.sin, k, v, rows, positions))  # fmt: skip
            o = self._note(f"{name}.self_attn (attention_exact)", attention_exact(q, k, v, rows, positions))
            x = self._project(layer.o, o.view(len(tokens), -1))
            x, residual = self._norm(f"{name}.post_attention_layernorm", layer.post_norm, x, residual)
            gated = silu_mul_exact(self._project(layer.gate_up, x))
            x = self._project(layer.down, self._note(f"{name}.mlp.act_fn (silu_mul_exact)", gated))
        return self._norm("norm", self.final_norm, x, residual)[0]

    def _norm(self, name: str, module: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        y, h = add_rmsnorm_exact(x, residual, module.weight.data, module.variance_epsilon)
        return self._note(f"{name} (add_rmsnorm_exact)", y), h

    def _project(self, projection: projections.Projection, x: Tensor) -> Tensor:
        parts = [self._linear(x, weight, bias) for weight, bias in projection.parts]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return self._note(f"{projection.name} ({self._linear.__name__})", y)

    def _choose(self) -> Tensor:
        if self._draw is None:
            return self._note("token (argmax_exact)", argmax_exact(self.logits))
        return self._note("token (sample_exact)", sample_exact(self.logits, *self._draw, self.position))

    def _note(self, name: str, result: Tensor) -> Tensor:
        if self.trace is not None:
            self.trace(name, result)
        return result


def _heat_and_seeds(temperature: float, seeds: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """sample_exact's temperature and seeds."""
    if not temperature > 0:
        raise BadInput(f"drawing takes a temperature above 0, got {temperature}")
    heat = torch.full((len(seeds),), temperature, dtype=torch.float32, device=device)
    return heat, torch.tensor(list(seeds), dtype=torch.int64, device=device)


def rope_settings(config: Any) -> dict[str, Any]:
    """How a transformers configuration turns positions, wherever its version keeps that."""
    settings = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    settings.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    settings.setdefault("rope_type", settings.pop("type", "default"))
    settings.setdefault("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0)
    return settings


class Lane:
    """What models/decode.py runs under a promise: one sequence, the model's logits after each token."""

    def __init__(self, model: nn.Module, wanted: Promise, capacity: int) -> None:
        self._runner = PromisedRunner(model, wanted, capacity)

    def start(self, prompt: Tensor) -> Tensor:
        """Forget everything, read the prompt (int64 [n]), return the logits [V] of what follows."""
        return self._runner.prefill(prompt[None])[0].clone()

    def step(self, token: int) -> Tensor:
        """Append a token, return the logits [V] of what follows."""
        self._runner.token.fill_(token)
        return self._runner.step()[0].clone()


def whole(model: nn.Module, ids: Tensor, wanted: Promise) -> Tensor:
    """The logits [n, V] for tokens ids [n] as one sequence, under a promise."""
    return PromisedRunner(model, wanted, len(ids), graph=False).whole(ids[None])[0]


def greedy(logits: Tensor, position: int) -> int:
    """The most likely token after logits [V], of equal ones the first."""
    return int(argmax_exact(logits[None])[0])


def drawn(temperature: float, seed: int) -> Callable[[Tensor, int], int]:
    """A draw at a temperature, decided by the seed and the position alone.

    Raises:
        BadInput: the temperature is not above 0.
    """

    def draw(logits: Tensor, position: int) -> int:
        heat, seeds = _heat_and_seeds(temperature, [seed], logits.device)
        return int(sample_exact(logits[None], heat, seeds, torch.full_like(seeds, position))[0])

    _heat_and_seeds(temperature, [seed], torch.device("cpu"))
    return draw
