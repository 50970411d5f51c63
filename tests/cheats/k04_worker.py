"""Kind 4: the judge's own code in the candidate's process is replaced, so that it answers before it has computed."""

import gc
import sys
from functools import partial
from types import SimpleNamespace

import torch

PROBLEM = "matmul_large"


class Replaced(torch.nn.Module):
    """The class's methods: timed calls are put off until somebody asks for their outputs."""

    def __init__(self):
        super().__init__()
        module = sys.modules.get("nybble.judge.worker")
        if module is not None:
            self.replace(module.Worker, module.Worker.fetch)

    def replace(self, where, fetch):
        late = {}

        def timed(worker, slots):
            late[0] = slots
            return {}, []

        def fetched(worker, what, index=0):
            if late:
                worker.snapshots, worker.outputs = [], [worker._run(slot) for slot in late.pop(0)]
            return fetch(worker, what, index)

        where.timed, where.fetch = timed, fetched

    def forward(self, a, b):
        return a @ b


class Instance(Replaced):
    """The same in the one object that is in use, found through the garbage collector."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        for found in gc.get_objects():
            if type(found).__name__ == "Worker" and hasattr(found, "snapshots"):
                self.bind(found)

    def bind(self, worker):
        methods = SimpleNamespace()
        self.replace(methods, type(worker).fetch)
        worker.timed = partial(methods.timed, worker)
        worker.fetch = partial(methods.fetch, worker)
