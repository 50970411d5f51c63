"""Whole-model decoding by the two known ways to stable results, with everything else as fast as nybble has it.

The products are those of known_ways.py. LayerCast keeps activations, cache and rotary tables in float32 and widens each
16-bit weight where it is used; the replacement computes in bf16 with one tile shape. Norms, rotation, attention and
gate are nybble's fused Triton ops in both, and the step is captured in a CUDA graph, so that what is compared is the
way and not its packaging. (As published, LayerCast runs eagerly: that would be slower.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from known_ways import fixed_matmul, layercast
from nybble.models import projections
from nybble.ops.decode_attention import decode_attention
from nybble.ops.rmsnorm import add_rmsnorm
from nybble.ops.rope_cache import rope_cache_
from nybble.ops.silu_mul import silu_mul

WAYS = {"layercast": (layercast, torch.float32), "replacement": (fixed_matmul, torch.bfloat16)}


class Decoder:
    """Greedy decoding at batch 1 of a Llama-family model with 16-bit weights on a GPU.

    Args:
        model: its fused projections become views, as in nybble's runners.
        way: of WAYS.
        capacity: tokens the cache holds.
    """

    def __init__(self, model: nn.Module, way: str, capacity: int) -> None:
        self.product, dtype = WAYS[way]
        whole: Any = model
        inner, config = whole.model, whole.config
        self.embedding, self.dtype = inner.embed_tokens.weight.data, dtype
        device = self.embedding.device
        self.layers = [projections.split(number, layer) for number, layer in enumerate(inner.layers)]
        self.norms = [(self._gain(layer.input_norm), self._gain(layer.post_norm)) for layer in self.layers]
        self.last, self.head, self.eps = self._gain(inner.norm), whole.lm_head.weight.data, config.rms_norm_eps
        d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        at = torch.arange(capacity, device=device)[None]
        self.cos, self.sin = (
            t[0].contiguous() for t in inner.rotary_emb(torch.empty(1, dtype=dtype, device=device), at)
        )
        shape = (len(self.layers), 1, config.num_key_value_heads, capacity, d)
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int32, device=device)
        self.logits = torch.empty(1, config.vocab_size, dtype=dtype, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def _gain(self, norm: Any) -> Tensor:
        return norm.weight.data.to(self.dtype)

    @torch.no_grad()
    def read(self, prompt: Tensor) -> Tensor:
        """Start anew with a prompt [T], token by token; the logits [V] after it."""
        if self._graph is None and self.embedding.is_cuda:
            self._capture()
        self.position.zero_()
        for token in prompt.tolist():
            self.token.fill_(token)
            self.decode(1)
        return self.logits[0]

    @torch.no_grad()
    def decode(self, count: int) -> None:
        """`count` more greedy tokens; nothing waits for the device."""
        for _ in range(count):
            self._step() if self._graph is None else self._graph.replay()

    def _step(self) -> None:
        x = torch.nn.functional.embedding(self.token, self.embedding).to(self.dtype)
        residual = None
        for index, (layer, (before, after)) in enumerate(zip(self.layers, self.norms, strict=True)):
            x, residual = add_rmsnorm(x, residual, before, self.eps)
            qkv, k, v = self._project(layer.qkv, x), self.k[index], self.v[index]
            q = rope_cache_(qkv[:, None], self.cos, self.sin, k, v, self.position)[:, 0]
            x = self._project(layer.o, decode_attention(q, k, v, self.position).view(1, -1))
            x, residual = add_rmsnorm(x, residual, after, self.eps)
            x = self._project(layer.down, silu_mul(self._project(layer.gate_up, x)))
        self.logits.copy_(self.product(add_rmsnorm(x, residual, self.last, self.eps)[0], self.head))
        self.token.copy_(self.logits.argmax(-1))
        self.position.add_(1)

    def _project(self, projection: projections.Projection, x: Tensor) -> Tensor:
        ((weight, _),) = projection.parts
        return self.product(x, weight)

    @torch.no_grad()
    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step()
            self._step()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()
