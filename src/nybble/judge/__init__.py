"""judge: is a kernel right, and is it fast? A verdict with evidence, a seed that replays it, and then the speed.

    from nybble.judge import judge
    print(judge("problem.py", "candidate.py").text())

The candidate runs in a process of its own (isolate.py), is asked many questions (trial.py, cases.py) by checks that
each stand for a way of fooling a benchmark (checks/), and is measured against a budget of error that honest code sets
(agreement.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nybble.judge.api import judge as judge
    from nybble.judge.isolate import Limits as Limits
    from nybble.judge.isolate import Zygote as Zygote
    from nybble.judge.verdict import Finding as Finding
    from nybble.judge.verdict import Verdict as Verdict

_HOMES = {"judge": "api", "Limits": "isolate", "Zygote": "isolate", "Finding": "verdict", "Verdict": "verdict"}

__all__ = ["Finding", "Limits", "Verdict", "Zygote", "judge"]


def __getattr__(name: str) -> Any:
    # Late, so that a candidate's process, which needs `worker` only, imports nothing else of the judge.
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'nybble.judge' has no attribute {name!r}")
    return getattr(import_module(f"nybble.judge.{_HOMES[name]}"), name)
