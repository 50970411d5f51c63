"""Kind 2: a thread or a process works on after the call has returned."""

import threading

import torch

PROBLEM = "matmul_large"


class Thread(torch.nn.Module):
    """Returns at once; a thread fills the output."""

    def forward(self, a, b):
        out = torch.zeros(a.shape[0], b.shape[1])
        threading.Thread(target=lambda: out.copy_(a @ b)).start()
        return out


class Queue(torch.nn.Module):
    """A thread that waits since construction takes the work from a queue."""

    def __init__(self):
        super().__init__()
        self.work, self.ready = [], threading.Semaphore(0)
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            self.ready.acquire()
            a, b, out = self.work.pop(0)
            torch.matmul(a, b, out=out)

    def forward(self, a, b):
        out = torch.empty(a.shape[0], b.shape[1])
        self.work.append((a, b, out))
        self.ready.release()
        return out


class Process(torch.nn.Module):
    """A forked process fills memory that both share."""

    def forward(self, a, b):
        import os

        out = torch.zeros(a.shape[0], b.shape[1]).share_memory_()
        if os.fork() == 0:
            out.copy_(a @ b)
            os._exit(0)
        return out
