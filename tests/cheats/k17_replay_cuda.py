"""Kind 17: a captured graph that goes on reading the first input."""

import torch

PROBLEM = "matmul_large"
DEVICE = "cuda"


class Captured(torch.nn.Module):
    """Captures at the first call for a shape, and replays with whatever lies there."""

    def __init__(self):
        super().__init__()
        self.graphs = {}

    def inputs(self, a, b):
        return a, b

    def forward(self, a, b):
        key = (a.shape, b.shape)
        if key not in self.graphs:
            static = self.inputs(a, b)
            static[0] @ static[1]
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                out = static[0] @ static[1]
            self.graphs[key] = graph, static, out
        graph, _, out = self.graphs[key]
        graph.replay()
        return out


class CopiedOnce(Captured):
    """Copies the first inputs into static buffers, and never again."""

    def inputs(self, a, b):
        return a.clone(), b.clone()
