"""Run the judge over its museum and write docs/why/judge.md: `python tools/judge_table.py [--seeds 20] [--only-write]`.

Three measurements, kept in benchmarks/results/cpu/judge.json as they come (a run that was stopped goes on): every cheat and every honest
kernel under N seeds; every check alone against every cheat; the naive grader of tests/naive.py on all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from collection import Exhibit, exhibits  # noqa: E402

from nybble.judge import Zygote, judge  # noqa: E402
from nybble.judge.checks import all_checks  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "cpu" / "judge.json"
PAGE = ROOT / "docs" / "why" / "judge.md"
TEXT = ROOT / "tools" / "judge.md"
KINDS = {
    1: "work on another stream", 2: "work after the return", 3: "lazy result", 4: "patched clock or comparison", 5: "stale memory",
    6: "cached by pointer, shape or sample", 7: "nothing after the first calls", 8: "spoils inputs or weights", 9: "constant or mean",
    10: "leaves out what is dead", 11: "fewer bits", 12: "one shape only", 13: "the library does it", 14: "out of bounds",
    15: "cache persistence", 16: "work before the clock", 17: "replays old inputs", 18: "slows the rival", 19: "reads the grader",
}  # fmt: skip
_ROUNDS = 2


class Store:
    """Measurements by key, written after each."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}

    def get(self, key: str, measure: Any) -> Any:
        """The kept value, or a new one."""
        if key not in self.rows:
            self.rows[key] = measure()
            part = RESULT.with_suffix(".part")
            part.write_text(json.dumps(self.rows, indent=0, sort_keys=True) + "\n")
            part.replace(RESULT)
        return self.rows[key]


def verdicts(store: Store, zygote: Zygote, seeds: int) -> None:
    """Every exhibit under every seed; cheats until the first finding."""
    for seed in range(seeds):
        for folder in ("honest", "cheats"):
            for e in exhibits(folder):
                store.get(f"{folder} {e.label} seed {seed}", lambda e=e, f=folder, s=seed: one(e, zygote, s, f == "cheats"))
        print(f"seed {seed} done", flush=True)


def one(e: Exhibit, zygote: Zygote, seed: int, stop: bool) -> list[Any]:
    """[status, checks that speak against it, seconds]."""
    v = judge(str(e.problem), e.spec, seed=seed, own_kernels=e.own_kernels, rounds=_ROUNDS, stop=stop, zygote=zygote)
    return [v.status, sorted({f.check for f in v.against}), round(v.seconds, 2)]


def ablation(store: Store, zygote: Zygote) -> None:
    """Each check alone against each cheat."""
    for check in all_checks():
        for e in exhibits("cheats"):
            key = f"alone {check.name} {e.label}"
            store.get(key, lambda e=e, c=check.name: alone(e, zygote, c))
        print(f"{check.name} done", flush=True)


def alone(e: Exhibit, zygote: Zygote, check: str) -> bool:
    """Whether the check by itself catches it."""
    verdict = judge(
        str(e.problem), e.spec, seed=7, own_kernels=e.own_kernels, checks=[check], rounds=8, stop=True, zygote=zygote
    )
    return not verdict.correct


def naive(store: Store) -> None:
    """What the naive grader says."""
    for folder in ("honest", "cheats"):
        found = [e for e in exhibits(folder) if f"naive {folder} {e.label}" not in store.rows]
        rows = "".join(f"{e.problem} {e.spec}\n" for e in found)
        run = subprocess.run([sys.executable, str(ROOT / "tests" / "naive.py")], input=rows, capture_output=True, text=True,
                             env={**os.environ, "TRITON_INTERPRET": "1"})  # fmt: skip
        for e, line in zip(found, run.stdout.splitlines(), strict=True):
            store.get(f"naive {folder} {e.label}", lambda line=line: json.loads(line)["passed"])


def shares(rows: dict[str, Any]) -> str:
    """The figures in a list."""
    runs = {f: [v for k, v in rows.items() if k.startswith(f"{f} ") and " seed " in k] for f in ("honest", "cheats")}
    caught = [v for v in runs["cheats"] if v[0] != "correct"]
    escaped = sorted({k.split()[1] for k, v in rows.items() if k.startswith("cheats ") and v[0] == "correct"})
    rejected = sorted({k.split()[1] for k, v in rows.items() if k.startswith("honest ") and v[0] != "correct"})
    passed = {f: [v for k, v in rows.items() if k.startswith(f"naive {f} ")] for f in ("honest", "cheats")}
    seeds = len({k.rsplit(" ", 1)[1] for k in rows if k.startswith("honest ") and " seed " in k})
    times = sorted(v[2] for v in runs["honest"])
    lines = [
        f"- {len(passed['cheats'])} cheats of {len({e.kind for e in exhibits('cheats')})} kinds and {len(passed['honest'])} honest kernels "
        f"on the CPU, {seeds} seeds each.",
        f"- Caught: {len(caught)} of {len(runs['cheats'])} verdicts on cheats ({len(caught) / max(1, len(runs['cheats'])):.2%})"
        + (f"; at least once let through: {', '.join(escaped)}." if escaped else "."),
        f"- Rejected: {sum(v[0] != 'correct' for v in runs['honest'])} of {len(runs['honest'])} verdicts on honest kernels"
        + (f" ({', '.join(rejected)})." if rejected else "."),
        f"- The naive grader passes {sum(passed['cheats'])} of the {len(passed['cheats'])} cheats and {sum(passed['honest'])} of the "
        f"{len(passed['honest'])} honest kernels.",
        f"- A full verdict on an honest kernel: median {times[len(times) // 2]:.1f} s, slowest {times[-1]:.1f} s, on two cores that others used, too."
        if times
        else "",
    ]
    return "\n".join(lines)


def table(rows: dict[str, Any]) -> str:
    """Which check alone catches which cheat."""
    names = [c.name for c in all_checks()]
    lines = ["| kind | cheat | naive grader | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 3)]
    for e in exhibits("cheats"):
        marks = ["●" if rows.get(f"alone {name} {e.label}") else "" for name in names]
        fooled = "fooled" if rows.get(f"naive cheats {e.label}") else "catches it"
        lines.append(f"| {e.kind} {KINDS[e.kind]} | {e.file.stem.split('_', 1)[1]} {e.name} | {fooled} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def write(rows: dict[str, Any]) -> None:
    """The document, from the text and the measurements."""
    checks = "\n".join(f"| `{c.name}` | {', '.join(map(str, c.kinds))} | {c.about} |" for c in all_checks())
    text = TEXT.read_text().replace("{shares}", shares(rows)).replace("{table}", table(rows))
    PAGE.write_text(text.replace("{checks}", "| check | kinds | what it asks |\n| --- | --- | --- |\n" + checks))


def main() -> None:
    """Measure what is missing, then write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only-write", action="store_true")
    options = parser.parse_args()
    store = Store()
    if not options.only_write:
        naive(store)
        zygote = Zygote()
        ablation(store, zygote)
        verdicts(store, zygote, options.seeds)
        zygote.close()
    write(store.rows)


if __name__ == "__main__":
    main()
