"""The recommendation: a pure function, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nybble.survey import Original, Row, recommend

ORIGINAL = Original(10.0, 40.0, 1000_000_000, "float32", "bfloat16", 500_000_000, 210)


def row(name: str, mb: int, kl: float | None, speedup: float | None, path: str = "native") -> Row:
    """A measured row; perplexity follows KL."""
    speed = speedup and speedup * ORIGINAL.tokens_per_second
    perplexity = None if kl is None else 10 * (1 + kl)
    return Row(name, "rtn", 4.0, mb * 10**6, perplexity, kl, 0.9, speed, path, "why", speedup)  # type: ignore[arg-type]


W8 = row("W8", 600, 0.003, 1.6)
W4 = row("W4", 400, 0.015, 2.4)
W4_SMALL = row("W4_SMALL", 380, 0.018, 2.35)
W3 = row("W3", 300, 0.3, 2.9)
NV = row("NV", 410, 0.01, 0.1, "emulated")
SLOW = row("SLOW", 500, 0.004, 0.7)
SHAKY_W8, SHAKY_W4 = (replace(good, tokens_per_second=4.0, speedup=0.1, busy=True) for good in (W8, W4))
REFUSED = Row("NO", "rtn", path="refused", why="needs a GPU")
MB = 10**6

CASES = [
    ("the fastest within the limit", [W8, W4, W3, NV], None, None, "W4"),
    ("of two as fast the smaller", [W8, W4, W4_SMALL], None, None, "W4_SMALL"),
    ("a tighter limit", [W8, W4, W3, NV], 0.005, None, "W8"),
    ("a looser limit", [W8, W4, W3, NV], 0.5, None, "W3"),
    ("nothing good enough keeps the original", [W3, REFUSED], None, None, "original"),
    ("emulated is never sold as fast", [NV], None, None, "original"),
    ("even if it happens to be", [row("NV", 410, 0.01, 3.0, "emulated")], None, None, "original"),
    ("slower than the original", [SLOW], None, None, "original"),
    ("as fast as the original within noise, and smaller", [row("EVEN", 500, 0.004, 0.97)], None, None, "EVEN"),
    ("a byte limit the original breaks", [SLOW, NV], None, 600 * MB, "SLOW"),
    ("a byte limit that only an emulated one keeps", [SLOW, NV], None, 450 * MB, "NV"),
    ("a byte limit that nothing good keeps", [W8, W3], None, 450 * MB, "original"),
    ("a byte limit below everything", [W8, W3], None, 1 * MB, "original"),
    ("a byte limit that changes nothing", [W8, W4], None, 2000 * MB, "W4"),
    ("both limits", [W8, W4, W4_SMALL, W3], 0.016, 500 * MB, "W4"),
    ("a scheme whose speed was not accepted", [row("UNTIMED", 300, 0.001, None)], None, None, "original"),
    ("no rows", [], None, None, "original"),
    ("only refusals", [REFUSED], None, 600 * MB, "original"),
    ("a disturbed one is not taken", [W8, replace(W4, speedup=50.0, busy=True)], None, None, "W8"),
    ("nor are others left for its sake", [W8, SHAKY_W4], None, None, "W8"),
    ("the original waits for speeds that can be trusted", [SHAKY_W8, SHAKY_W4], None, None, "original"),
    ("a byte limit keeps only disturbed ones: the best", [SHAKY_W8, SHAKY_W4, NV], None, 600 * MB, "W8"),
    ("a disturbed one that is not good enough", [W8, replace(W3, busy=True)], None, None, "W8"),
    ("a limit is included", [row("EDGE", 400, 0.02, 2.0)], 0.02, 400 * MB, "EDGE"),
]


@pytest.mark.parametrize(("rows", "max_kl", "max_bytes", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_scheme(rows: list[Row], max_kl: float | None, max_bytes: int | None, expected: str) -> None:
    found = recommend(rows, ORIGINAL, max_kl, max_bytes)
    assert found.scheme == expected
    assert found.reason.endswith(".")
    assert "None" not in found.reason
    assert "nan" not in found.reason


def test_the_order_of_rows_does_not_matter() -> None:
    rows = [W8, W4, W4_SMALL, W3, NV, SLOW, REFUSED]
    assert recommend(rows, ORIGINAL) == recommend(rows[::-1], ORIGINAL)


def test_the_reason_holds_the_numbers() -> None:
    reason = recommend([W8, W4], ORIGINAL).reason
    for part in ("400 MB instead of 1000 MB (40%)", "2.40x", "96.0 tokens/s", "KL 0.015", "10.15", "+1.5%", "KL 0.02"):
        assert part in reason


DOUBT = "something disturbed the machine each time {} decoded"


@pytest.mark.parametrize(
    ("rows", "max_bytes", "doubtful"),
    [
        ([W8, W4], None, None),
        ([W8, SHAKY_W4], None, "W4"),
        ([SHAKY_W8, SHAKY_W4, NV], None, "W8, W4"),
        ([SHAKY_W8, SHAKY_W4, NV], 450 * MB, "W4"),
        ([W8, replace(W3, busy=True)], None, None),
        ([W8, replace(NV, busy=True)], None, None),
    ],
    ids=["none", "one that could be faster", "all", "all that fit", "not good enough", "emulated"],
)
def test_speeds_that_could_have_decided_are_named(rows: list[Row], max_bytes: int | None, doubtful: str | None) -> None:
    reason = recommend(rows, ORIGINAL, None, max_bytes).reason
    assert ("This may change" in reason) == (doubtful is not None)
    assert doubtful is None or (DOUBT.format(doubtful) in reason and "The same command measures it again." in reason)


def test_a_disturbed_speed_is_never_told_as_one() -> None:
    for limit in (None, 450 * MB, 600 * MB):
        assert "0.10x" not in recommend([SHAKY_W8, SHAKY_W4], ORIGINAL, None, limit).reason


def test_emulated_is_called_so() -> None:
    assert "emulated here" in recommend([SLOW, NV], ORIGINAL, None, 450 * MB).reason
    assert "only emulated here" in recommend([NV], ORIGINAL).reason


def test_what_could_be_relaxed_is_named() -> None:
    assert "W3" in recommend([W3], ORIGINAL).reason
    assert "--max-kl" in recommend([W3], ORIGINAL).reason
    assert "--max-bytes" in recommend([SLOW], ORIGINAL).reason
    assert "Relax" in recommend([W8, W3], ORIGINAL, None, 450 * MB).reason
