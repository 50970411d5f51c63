"""Decoding for Llama-family models: a static cache, fused small ops, and one captured CUDA graph a step.

At batch 1 a decode step reads every weight once and does little else, so whatever is not reading weights is loss:
launches from Python, projections too small to fill the machine, hidden states going back and forth. This runner
takes a transformers model as the definition and its modules' weights as they are, bf16 or quantized, and runs

    add_rmsnorm -> [q k v] -> rope_attention_ -> o -> add_rmsnorm -> [gate up] -> silu_mul -> down

with the projections in brackets fused along N, with norms and gates inside of the products where these only stream
weights past a few tokens, and with norms and gates that make codes where the linear after them multiplies codes
(fed.py). On a GPU the whole step, argmax included, is captured once and replayed; the position lives in device memory,
so that nothing depends on the host. Elsewhere the same code runs step by step. Fused weights replace those of the
model's modules, which become views of them: nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import BadInput, Unsupported
from nybble.models.fed import Projection, mlp, normed
from nybble.models.steps import Steps
from nybble.ops import QuantLinear
from nybble.ops.embed_token import embed_token_
from nybble.ops.greedy_token import greedy_token_
from nybble.ops.rope_attention import rope_attention_
from nybble.ops.rope_cache import rope_cache_
from nybble.quantize.tensor import concatenate, split_rows

FAMILY = ("llama", "mistral", "qwen2")


def refusal(model: nn.Module) -> str | None:
    """Why this runner cannot take a model; None where it can."""
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in FAMILY:
        return f"model type {kind!r} is not one of {', '.join(FAMILY)}"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r}, not silu"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"attention slides over {config.sliding_window} tokens"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3"):
        return f"rotary positions of type {rope['rope_type']!r} change with the length"
    if config.hidden_size < 1 or config.num_attention_heads % config.num_key_value_heads:
        return f"{config.num_attention_heads} query heads over {config.num_key_value_heads} key heads"
    return None


@dataclass
class _Layer:
    """One transformer layer as the runner sees it."""

    input_norm: nn.Module
    qkv: Projection
    o: Projection
    post_norm: nn.Module
    gate_up: Projection
    down: Projection


def fuse(modules: Sequence[nn.Module]) -> Projection:
    """One projection for several that share their input, outputs side by side.

    Their weights become views of the fused one. Weights that cannot be joined (formats or tensor scales that differ)
    and modules that change their inputs first (hooks, as rotations set them) are called one by one.
    """
    if any(module._forward_pre_hooks for module in modules):
        return lambda x: torch.cat([module(x) for module in modules], -1)
    if all(type(module) is nn.Linear for module in modules):
        return _fuse_linears([module for module in modules if isinstance(module, nn.Linear)])
    quantized = [module for module in modules if isinstance(module, QuantLinear)]
    if len(quantized) < len(modules) or any(q.activation != quantized[0].activation for q in quantized):
        return lambda x: torch.cat([module(x) for module in modules], -1)
    first = quantized[0]
    whole = concatenate([module.weight for module in quantized])
    if whole is None:
        return lambda x: torch.cat([module(x) for module in modules], -1)
    bias = _fused_bias([module.bias for module in quantized])
    for module, part in zip(quantized, split_rows(whole, [m.out_features for m in quantized]), strict=True):
        if part is not None:
            module.set_weight(part)
    parameter = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return QuantLinear(whole, parameter, first.activation, first.activation_amax)


def _fuse_linears(modules: list[nn.Linear]) -> Projection:
    weight = torch.cat([module.weight.data for module in modules])
    bias = _fused_bias([module.bias for module in modules])
    for module, part in zip(modules, weight.split([m.out_features for m in modules]), strict=True):
        module.weight.data = part
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def _fused_bias(biases: Sequence[Tensor | None]) -> Tensor | None:
    present = [bias.data for bias in biases if bias is not None]
    if present and len(present) < len(biases):
        raise BadInput("some of the fused projections have a bias and some have none")
    return torch.cat(present) if present else None


class Runner(Steps):
    """Greedy decoding of one batch of equally long sequences.

    Args:
        model: a transformers causal LM of the Llama family; its fused projections become views.
        capacity: tokens the cache holds, prompt included.
        batch: sequences.
        graph: whether to capture the step; None does so on CUDA.

    Raises:
        Unsupported: the model is of another kind; the message says what kind.
    """

    def __init__(self, model: nn.Module, capacity: int, batch: int = 1, graph: bool | None = None) -> None:
        reason = refusal(model)
        if reason is not None:
            raise Unsupported(f"the Llama runner does not take this model: {reason}")
        inner: Any = model.model
        config: Any = model.config
        self.model, self.capacity, self.batch = model, capacity, batch
        self.embedding, self.final_norm = inner.embed_tokens.weight, inner.norm
        self.head: Any = model.lm_head
        device, dtype = self.embedding.device, self.embedding.dtype
        self.layers = [self._layer(layer) for layer in inner.layers]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.query_heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
        )
        positions = torch.arange(capacity, device=device)[None]
        cos, sin = inner.rotary_emb(torch.empty(1, dtype=dtype, device=device), positions)
        self.cos, self.sin = cos[0].to(dtype).contiguous(), sin[0].to(dtype).contiguous()
        shape = (len(self.layers), batch, self.kv_heads, capacity, head_dim)
        self.k_cache = torch.zeros(shape, dtype=dtype, device=device)
        self.v_cache = torch.zeros(shape, dtype=dtype, device=device)
        self.token = torch.zeros(batch, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int32, device=device)
        self.tokens = torch.zeros((batch, capacity), dtype=torch.int64, device=device)
        self.turns = torch.zeros(batch, dtype=torch.int32, device=device)
        self.logits = torch.empty((batch, config.vocab_size), dtype=dtype, device=device)
        self._wants_graph = device.type == "cuda" if graph is None else graph
        self.length = 0

    @staticmethod
    def _layer(layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return _Layer(
            layer.input_layernorm,
            fuse([attention.q_proj, attention.k_proj, attention.v_proj]),
            attention.o_proj,
            layer.post_attention_layernorm,
            fuse([mlp.gate_proj, mlp.up_proj]),
            mlp.down_proj,
        )

    @torch.no_grad()
    def prefill(self, tokens: Tensor) -> Tensor:
        """Start new sequences.

        Args:
            tokens: int64 [batch, T], T from 1 to the capacity.

        Returns:
            The logits [batch, V] after the last token; its argmax is the first token `decode` continues from.
        """
        batch, length = tokens.shape
        if batch != self.batch or not 1 <= length <= self.capacity:
            raise BadInput(f"prefill takes [{self.batch}, 1 to {self.capacity}] tokens, got {list(tokens.shape)}")
        x = torch.nn.functional.embedding(tokens, self.embedding)
        residual: Tensor | None = None
        self.position.zero_()
        for index, layer in enumerate(self.layers):
            qkv, residual = normed(layer.qkv, layer.input_norm, x, residual)
            x = layer.o(self._attend(qkv, index))
            x, residual = mlp(layer.gate_up, layer.down, layer.post_norm, x, residual)
        last = None if residual is None else residual[:, -1]
        self.logits.copy_(normed(self.head, self.final_norm, x[:, -1], last)[0])
        self.length = length
        self.tokens[:, :length] = tokens
        self.token.copy_(self.logits.argmax(-1))
        self.position.fill_(length)
        return self.logits

    def _attend(self, qkv: Tensor, layer: int) -> Tensor:
        """Causal attention of a prompt [B, T, ...], its keys and values put into the cache."""
        batch, length, _ = qkv.shape
        k, v = self.k_cache[layer], self.v_cache[layer]
        q = rope_cache_(qkv, self.cos, self.sin, k, v, self.position).transpose(1, 2)
        o = torch.nn.functional.scaled_dot_product_attention(
            q, k[:, :, :length], v[:, :, :length], is_causal=True, enable_gqa=True
        )
        return o.transpose(1, 2).reshape(batch, length, -1)

    def _step(self) -> None:
        x = embed_token_(self.token, self.position, self.tokens, self.embedding)
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            qkv, residual = normed(layer.qkv, layer.input_norm, x, residual)
            o = rope_attention_(
                qkv, self.cos, self.sin, self.k_cache[index], self.v_cache[index], self.position
            )  # fmt: skip
            x = layer.o(o.view(self.batch, -1))
            x, residual = mlp(layer.gate_up, layer.down, layer.post_norm, x, residual)
        logits, _ = normed(self.head, self.final_norm, x, residual)
        greedy_token_(logits, self.token, self.position, self.turns)
        self.logits.copy_(logits)
