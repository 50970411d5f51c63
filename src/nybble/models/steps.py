"""Decoding one token at a time from buffers that stay where they are, so that a step can be captured in a CUDA graph.

A runner fills the buffers in its prefill and says in `_step` what one token does to them; nothing in a step may depend
on the host. The rest is the same for every runner and lives here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nybble.errors import BadInput


class Steps:
    """What runners of whole steps have in common.

    Attributes:
        capacity: tokens the cache holds, prompt included.
        length: tokens in the cache; 0 before a prompt was read.
        token: int64 [batch], the pending tokens: chosen, but not yet in the cache.
        position: int32 [1] or [batch], where they will stand.
        tokens: int64 [batch, capacity], everything so far.
        logits: [batch, V] after the last step.
    """

    capacity: int
    length: int
    token: Tensor
    position: Tensor
    tokens: Tensor
    logits: Tensor
    _wants_graph: bool
    _graph: torch.cuda.CUDAGraph | None = None

    def _step(self) -> None:
        """One token a sequence: the pending token goes in at `position`, the next one becomes pending."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self) -> Tensor:
        """Put the pending token in and return the logits [batch, V] after it (a buffer that the next step reuses)."""
        if self.length == 0:
            raise BadInput("prefill a prompt first")
        if self.length >= self.capacity:
            raise BadInput(f"the cache is full: {self.capacity} tokens")
        if self._wants_graph and self._graph is None:
            self._graph = self._captured()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()
        self.length += 1
        return self.logits

    def decode(self, count: int) -> Tensor:
        """`count` tokens after what is in the cache, int64 [batch, count]; nothing waits for the device."""
        start = self.length
        for _ in range(count):
            self.step()
        return self.tokens[:, start : start + count]

    def _captured(self) -> torch.cuda.CUDAGraph:
        """A recorded step. Warming up runs it for real, so the state that it changes is put back after each time."""
        kept = [(t, t.clone()) for t in (self.token, self.position, self.tokens, self.logits)]

        def restore() -> None:
            for tensor, value in kept:
                tensor.copy_(value)

        here, side = torch.cuda.current_stream(self.token.device), torch.cuda.Stream(self.token.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
                restore()
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        restore()
        return graph
