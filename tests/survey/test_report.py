"""What a survey leaves behind: a page that needs nothing else, a picture whose labels do not cover each other."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from nybble.survey import Original, Recommendation, Result, Row, plot, report, store
from nybble.survey.rows import Identity

IDENTITY = Identity("0.1", "2.13", "a <b> model", ["f"], "t & u", "ab" * 32, 4096, 1024, 0, "a cpu; 2 threads", "auto")
ORIGINAL = Original(8.4, 40.0, 269_000_000, "float32", "bfloat16", 134_000_000, 210)


def rows(count: int) -> list[Row]:
    """Many schemes of nearly the same size and quality, the worst case for labels; and a refusal."""
    made = [
        Row(f"SCHEME_{i}", "rtn", 4.1, 110_000_000 + 200_000 * i, 9.0, 0.3 * 1.05**i, 0.7, 40.0 + i,
            "native" if i % 2 else "emulated", "because <it> is", (40.0 + i) / 40)
        for i in range(count)
    ]  # fmt: skip
    return [*made, Row("NONE", "rtn", path="refused", why="K = 5 <does> not fit")]


def result(count: int = 20) -> Result:
    """A survey of `count` schemes."""
    advice = Recommendation("SCHEME_1", "Because 1 < 2.")
    return Result(IDENTITY, {"device": "cpu", "features": ("avx2",)}, ORIGINAL, rows(count), advice)


def test_json_has_the_schema(tmp_path: Path) -> None:
    report.write_all(result(2), tmp_path)
    found = json.loads((tmp_path / store.RESULT).read_text())
    assert {"nybble", "model", "device", "text", "tokens", "reference", "rows", "recommendation"} <= set(found)
    assert found["recommendation"] == {"scheme": "SCHEME_1", "reason": "Because 1 < 2.", "method": "rtn"}
    assert {"perplexity", "bytes", "tokens_per_second"} <= set(found["reference"])
    keys = {
        "scheme",
        "method",
        "bits_per_weight",
        "bytes",
        "perplexity",
        "kl",
        "top1",
        "tokens_per_second",
        "path",
        "why",
    }
    assert len(found["rows"]) == 3
    for row in found["rows"]:
        assert keys <= set(row)
        assert row["path"] in ("native", "emulated", "refused")
        assert isinstance(row["why"], str)
    assert found["rows"][-1]["perplexity"] is None


def test_json_comes_back(tmp_path: Path) -> None:
    found = json.loads(json.dumps(report.as_json(result(2))))
    found["machine"]["torch"] = IDENTITY.torch
    assert report.as_json(report.from_json(found)) == found


class Page(HTMLParser):
    """What a page refers to, and whether its tags close."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name.rpartition(":")[2] in ("href", "src", "data")]
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open[-1:] == [tag]:
            self.open.pop()


def test_the_page_is_self_contained() -> None:
    content = report.page(result())
    page = Page(content)
    assert page.open == []
    assert page.links
    assert [link for link in page.links if not link.startswith("#")] == []
    assert re.findall(r"https?:|//|@import|url\((?!#)", content) == []


def test_the_page_says_everything_and_escapes_it() -> None:
    content = report.page(result(3))
    for part in (
        "a &lt;b&gt; model",
        "t &amp; u",
        "Because 1 &lt; 2.",
        "K = 5 &lt;does&gt; not fit",
        "a cpu; 2 threads",
    ):
        assert part in content
    assert "$" not in re.sub("<svg.*</svg>", "", content, flags=re.DOTALL)
    assert content.count("<tr") == 1 + 1 + 4
    assert content.count('<tr class="chosen"') == 1


def test_nothing_is_planned_for_what_was_emulated() -> None:
    native, emulated = (replace(row, expected=3.21) for row in (rows(2)[1], rows(2)[0]))
    both = report.page(replace(result(2), rows=[native, emulated]))
    assert both.count("3.21</td>") == 1
    assert both.count("a native kernel is planned at 3.21x") == 1
    assert len(plot.draw(replace(result(2), rows=[native, emulated])).axes[1].get_lines()[0].get_xdata()) == 1


def test_speeds_of_a_disturbed_machine_are_marked() -> None:
    note = "Speeds marked ? are not to be trusted"
    assert note not in report.page(result(3))
    noisy = replace(result(3), rows=[replace(row, busy=row.scheme == "SCHEME_1") for row in rows(3)])
    content = report.page(noisy)
    assert f"{note} (SCHEME_1): " in content
    assert [content.count(f"<td>{figure}</td>") for figure in ("41.0?", "1.02?", "41.0", "42.0", "1.05")] == [
        1,
        1,
        0,
        1,
        1,
    ]
    assert [text.get_text() for text in plot.draw(noisy).axes[1].texts] == [" 1.00x", " 1.02x?", " 1.05x"]


def test_a_disturbed_original_is_marked() -> None:
    content = report.page(replace(result(1), original=replace(ORIGINAL, busy=True)))
    assert "not to be trusted (original): " in content
    assert content.count("<td>40.0?</td>") == 1


@pytest.mark.parametrize("count", [0, 1, 22, 40])
def test_no_label_covers_another_or_a_point(count: int) -> None:
    figure = plot.draw(result(count))
    axes = figure.axes[0]
    figure.canvas.draw()
    names = [text for text in axes.texts if text.get_text().startswith("SCHEME_")]
    boxes = [text.get_window_extent() for text in names]
    assert len(boxes) == count
    covered = [(i, j) for i, a in enumerate(boxes) for j, b in enumerate(boxes[:i]) if a.overlaps(b)]
    assert covered == []
    points = [axes.transData.transform((row.bytes / 1e6, row.kl)) for row in rows(count) if row.bytes and row.kl]
    assert [(x, y) for x, y in points for box in boxes if box.contains(x, y)] == []


def test_an_exact_copy_can_be_drawn() -> None:
    exact = replace(result(1), rows=[replace(rows(1)[0], kl=0.0)])
    assert plot.svg(exact).startswith("<svg")


def test_the_picture_is_the_same_each_time() -> None:
    assert plot.svg(result(3)) == plot.svg(result(3))


def test_place_keeps_off_what_is_taken() -> None:
    ((left, _),) = plot.place([(50.0, 50.0)], [(30.0, 10.0)], (0, 0, 100, 100), [(52, 40, 100, 60)])
    assert left + 30 < 50


def test_crowded_labels_stand_in_the_order_of_their_points() -> None:
    points = [(50.0, 50.0 + i % 3) for i in range(6)]
    places = plot.place(points, [(30.0, 10.0)] * 6, (0, 0, 200, 100))
    assert len({x for x, _ in places}) == 1
    heights = sorted(y for _, y in places)
    assert [b - a for a, b in pairwise(heights)] == [10.0] * 5
    assert heights[0] >= 0
    assert heights[-1] + 10 <= 100
    assert max(places[i][1] for i in (0, 3)) < min(places[i][1] for i in (2, 5))
