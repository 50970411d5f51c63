"""Run the judge over its museum and write docs/why/judge.md: `python benchmarks/judge.py [--seeds 20] [--only-write]`.

Four measurements, kept in benchmarks/results/cpu/judge.json as they come, so that a run that was stopped goes on:
every cheat and every honest kernel under N seeds; every check alone against every cheat; the naive grader of
tests/naive.py; what both graders cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import naive as naive_grader  # noqa: E402
import record  # noqa: E402
from collection import PROBLEMS, Exhibit, exhibits  # noqa: E402
from nybble.files import write_whole  # noqa: E402
from nybble.judge import Zygote, judge  # noqa: E402
from nybble.judge.checks import Check, all_checks  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "cpu" / "judge.json"
PAGE = ROOT / "docs" / "why" / "judge.md"
MARKS = ("<!-- measured: {} -->", "<!-- end of {} -->")
FOLDERS = ("honest", "cheats")
ROUNDS = 2
COSTLY = ("matmul", "linear_relu", "rmsnorm", "softmax_wide", "batchnorm_conv", "matmul_large", "matmul_slow")
REPEATS = 3
CAUGHT = ("wrong", "cheating", "invalid measurement")
Rows = dict[str, Any]


class Store:
    """Measurements by key, written after each."""

    def __init__(self) -> None:
        self.rows: Rows = json.loads(RESULT.read_text()) if RESULT.exists() else {}

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        """The kept value, or a new one."""
        if key not in self.rows:
            self.rows[key] = measure()
            write_whole(RESULT, json.dumps(self.rows, indent=0, sort_keys=True) + "\n")
        return self.rows[key]


def verdicts(store: Store, zygote: Zygote, seeds: int) -> None:
    """Every exhibit under every seed; cheats until the first finding."""
    for seed in range(seeds):
        for folder in FOLDERS:
            for e in exhibits(folder):
                key = f"{folder} {e.label} seed {seed}"
                store.get(key, lambda e=e, f=folder, s=seed: one(e, zygote, s, f == "cheats"))
        print(f"seed {seed} done", flush=True)


def one(e: Exhibit, zygote: Zygote, seed: int, stop: bool) -> list[Any]:
    """[status, checks that speak against it, seconds]."""
    options: Any = {"own_kernels": e.own_kernels, "rounds": ROUNDS, "stop": stop, "zygote": zygote}
    v = judge(str(e.problem), e.spec, seed=seed, **options)
    return [v.status, sorted({f.check for f in v.against}), round(v.seconds, 2)]


def ablation(store: Store, zygote: Zygote) -> None:
    """Each check alone against each cheat."""
    for check in usual_checks():
        for e in exhibits("cheats"):
            store.get(f"alone {check.name} {e.label}", lambda e=e, c=check.name: alone(e, zygote, c))
        print(f"{check.name} done", flush=True)


def usual_checks() -> list[Check]:
    """Those that every verdict runs."""
    return [check for check in all_checks() if not check.optional]


def alone(e: Exhibit, zygote: Zygote, check: str) -> bool:
    """Whether the check by itself catches it."""
    options: Any = {"own_kernels": e.own_kernels, "rounds": 8, "stop": True, "zygote": zygote}
    return judge(str(e.problem), e.spec, seed=7, checks=[check], **options).status in CAUGHT


def naive(store: Store) -> None:
    """What the naive grader says."""
    for folder in FOLDERS:
        found = [e for e in exhibits(folder) if f"naive {folder} {e.label}" not in store.rows]
        rows = "".join(f"{e.problem} {e.spec}\n" for e in found)
        command = [sys.executable, str(ROOT / "tests" / "naive.py")]
        here = {**os.environ, "TRITON_INTERPRET": "1"}
        run = subprocess.run(command, input=rows, capture_output=True, text=True, env=here)
        for e, line in zip(found, run.stdout.splitlines(), strict=True):
            store.get(f"naive {folder} {e.label}", lambda line=line: json.loads(line)["passed"])


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {**record.origin(), "cores": os.cpu_count()}


def cost(store: Store, zygote: Zygote) -> None:
    """Seconds of both graders on problems that are their own candidates: as commands, and once they are started."""
    for name in COSTLY:
        store.get(f"cost {name}", lambda n=name: costs_of(PROBLEMS / f"{n}.py", zygote))


def costs_of(problem: Path, zygote: Zygote) -> dict[str, float]:
    """Medians, both graders in turn."""
    here = {**os.environ, "OMP_NUM_THREADS": "1"}
    commands = {"naive": [sys.executable, str(ROOT / "tests" / "naive.py")],
                "judge": [sys.executable, "-m", "nybble", "judge", str(problem), f"{problem}:Model"]}  # fmt: skip
    taken: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        for who, command in commands.items():
            start = time.monotonic()
            subprocess.run(command, input=f"{problem} {problem}:Model\n", text=True, capture_output=True, check=True,
                           env=here)  # fmt: skip
            taken.setdefault(f"{who} command", []).append(time.monotonic() - start)
        start = time.monotonic()
        naive_grader.grade_apart(str(problem), str(problem), "Model")
        taken.setdefault("naive", []).append(time.monotonic() - start)
        taken.setdefault("judge", []).append(judge(str(problem), f"{problem}:Model", zygote=zygote).seconds)
    return {who: round(statistics.median(seconds), 3) for who, seconds in taken.items()}


def chosen(rows: Rows, start: str, inside: str = "") -> Rows:
    """The measurements whose key begins so."""
    return {k: v for k, v in rows.items() if k.startswith(start) and inside in k}


def shares(rows: Rows) -> str:
    """The figures in a list."""
    cheats, honest = (chosen(rows, f"{folder} ", " seed ") for folder in ("cheats", "honest"))
    escaped = {k.split()[1] for k, v in cheats.items() if v[0] not in CAUGHT}
    rejected = {k.split()[1] for k, v in honest.items() if v[0] != "correct"}
    caught = sum(v[0] in CAUGHT for v in cheats.values())
    fooled, fair = chosen(rows, "naive cheats "), chosen(rows, "naive honest ")
    times = sorted(v[2] for v in honest.values())
    seeds = len({k.rsplit(" ", 1)[1] for k in cheats})
    kinds = len({e.kind for e in exhibits("cheats")})
    return "\n".join([
        f"- {len(exhibits('cheats'))} cheats, {kinds} kinds; {len(exhibits('honest'))} honest kernels; seeds: {seeds}; "
        f"torch {rows['machine']['torch']}, {rows['machine']['date'][:10]}, commit {rows['machine']['commit']}.",
        f"- Caught: {caught} of {len(cheats)} verdicts on cheats, {caught / max(1, len(cheats)):.2%}. "
        + (f"Let through at least once: {', '.join(sorted(escaped))}." if escaped else "None was let through."),
        f"- Rejected: {sum(v[0] != 'correct' for v in honest.values())} of {len(honest)} verdicts on honest kernels"
        + (f": {', '.join(sorted(rejected))}." if rejected else "."),
        f"- The naive grader passes {sum(fooled.values())} of {len(fooled)} cheats "
        f"({sum(fooled.values()) / len(fooled):.0%}) and {sum(fair.values())} of {len(fair)} honest kernels.",
        f"- A full verdict on an honest kernel, {ROUNDS} rounds of timing: median {times[len(times) // 2]:.1f} s, "
        f"slowest {times[-1]:.1f} s, on two cores that other work used at the same time.",
    ])  # fmt: skip


def prices(rows: Rows) -> str:
    """What both graders cost."""
    head = ("problem", "naive command, s", "`nybble judge`, s", "ratio", "naive, started, s", "a verdict, s", "ratio")
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for name in COSTLY:
        r = rows.get(f"cost {name}")
        if r:
            whole, inside = r["judge command"] / r["naive command"], r["judge"] / r["naive"]
            lines.append(
                f"| {name} | {r['naive command']:.1f} | {r['judge command']:.1f} | {whole:.1f} "
                f"| {r['naive']:.2f} | {r['judge']:.1f} | {inside:.0f} |"
            )
    return "\n".join(lines)


def table(rows: Rows) -> str:
    """Which check alone catches which cheat."""
    names = [c.name for c in usual_checks()]
    lines = ["| kind | cheat | fools the naive grader | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 3)]
    for e in exhibits("cheats"):
        marks = ["●" if rows.get(f"alone {name} {e.label}") else "" for name in names]
        fooled = "yes" if rows.get(f"naive cheats {e.label}") else ""
        lines.append(f"| {e.kind} | {e.label.split('_', 1)[1]} | {fooled} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def catalogue(rows: Rows) -> str:
    """The checks."""
    lines = [f"| `{c.name}` | {', '.join(map(str, c.kinds))} | {c.about} |" for c in all_checks()]
    return "\n".join(["| check | kinds | what it asks |", "| --- | --- | --- |", *lines])


def write(rows: Rows) -> None:
    """Put what was measured between its marks in the document."""
    text = PAGE.read_text()
    for name, part in (("shares", shares), ("cost", prices), ("checks", catalogue), ("ablation", table)):
        head, _, rest = text.partition(MARKS[0].format(name))
        _, end, tail = rest.partition(MARKS[1].format(name))
        text = f"{head}{MARKS[0].format(name)}\n{part(rows)}\n{end}{tail}"
    PAGE.write_text(text)


def main() -> None:
    """Measure what is missing, then write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only-write", action="store_true")
    options = parser.parse_args()
    store = Store()
    if not options.only_write:
        store.get("machine", machine)
        naive(store)
        zygote = Zygote()
        cost(store, zygote)
        ablation(store, zygote)
        verdicts(store, zygote, options.seeds)
        zygote.close()
    write(store.rows)


if __name__ == "__main__":
    main()
