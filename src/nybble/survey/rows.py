"""What a survey is made of: the settings it was run with, the original's figures, and one row a scheme.

All are frozen dataclasses of plain values, so that they go to JSON and come back as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self

Service = Literal["native", "emulated", "refused"]

DEFAULT_SCHEMES = (
    "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8A16", "MXFP8",
    "W4A16", "W4A16_ASYM", "W4A16_G64", "W4A16_G32", "W4A16_G32_ASYM", "W4A8",
    "NVFP4A16", "NVFP4A16_4OVER6", "NVFP4", "MXFP4A16", "MXFP4A16_FLOOR", "MXFP4", "NF4", "UFP4A16",
    "W3A16", "W2A16",
)  # fmt: skip
"""compressed-tensors' presets and what they are best compared with, by falling bits."""

ORIGINAL = "original"
"""What the model that is not quantized is called, in races and where it is the one to keep."""

KEPT_BITS = 16
"""What a weight that is not quantized counts: checkpoints store such weights in bf16 or fp16."""


def busy_note(original: Original, rows: Sequence[Row]) -> str:
    """What to say of speeds that are not to be trusted; empty where all are."""
    busy = [*([ORIGINAL] if original.busy else []), *(row.label for row in rows if row.busy)]
    if not busy:
        return ""
    return (
        f"Speeds marked ? are not to be trusted ({', '.join(busy)}): something disturbed the machine each time they "
        f"were measured. The same command measures these again; leave the machine to it."
    )


def megabytes(size: int) -> str:
    """A size in MB with three digits or more: 0.118, 24.3, 1203."""
    mb = size / 1e6
    return f"{mb:.0f}" if mb >= 100 else f"{mb:.3g}"


class _Plain:
    """To a dictionary and back; keys that are not known are left out."""

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them."""
        return asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The inverse of `as_dict`."""
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        return cls(**{key: value for key, value in values.items() if key in known})


@dataclass(frozen=True)
class Identity(_Plain):
    """What two runs must have in common for the rows of one to serve the other.

    Attributes:
        nybble, torch: versions.
        model: as it was asked for.
        files: the model's files, each "name size time".
        text: the text's name, and `text_sha256` the hash of its content.
        tokens, window: how many tokens were predicted from, in windows of how many.
        seed: of whatever draws numbers.
        device: the machine in a sentence.
        dtype: what was asked for, or "auto".
    """

    nybble: str
    torch: str
    model: str
    files: list[str]
    text: str
    text_sha256: str
    tokens: int
    window: int
    seed: int
    device: str
    dtype: str

    def differences(self, other: Identity) -> list[str]:
        """The fields that differ, with both values."""
        mine, theirs = self.as_dict(), other.as_dict()
        return [f"{key}: {theirs[key]!r} there, {mine[key]!r} here" for key in mine if mine[key] != theirs[key]]


@dataclass(frozen=True)
class Original(_Plain):
    """The original's figures.

    Attributes:
        perplexity: on the text.
        tokens_per_second: decoding, in `decode_dtype`.
        bytes: of all weights at 16 bits.
        bits_per_weight: 16.
        quality_dtype, decode_dtype: what was computed in (models/precision.py); on a CPU the faster of float32 and
            bfloat16 decodes.
        parameters: how many.
        linears: how many nn.Linear a scheme quantizes.
        busy: as a row's; then `decode_dtype` may be the wrong choice.
    """

    perplexity: float
    tokens_per_second: float
    bytes: int
    quality_dtype: str
    decode_dtype: str
    parameters: int
    linears: int
    bits_per_weight: float = KEPT_BITS
    busy: bool = False


@dataclass(frozen=True)
class Row(_Plain):
    """A scheme's figures; None where there is none.

    Attributes:
        scheme, method: what was done.
        bits_per_weight: stored bits for each quantized weight, scales included.
        bytes: of all weights: quantized ones as stored, the others at 16 bits.
        perplexity, kl, top1: as models/evaluate.py defines them.
        tokens_per_second: decoding at batch 1.
        speedup: this speed over the original's, measured in turns.
        dtype: what it decodes in: the original's, or another that a native implementation wants.
        path: native, emulated or refused, at M = 1.
        window_path: the same for a whole window of tokens.
        why: which implementation serves, or why it is emulated or refused.
        decode_error: how far the timed logits were from the definition's.
        seconds: what the row took to measure, of which quantizing took `quantize_seconds`.
        expected: the speedup that the planner predicts of the best native kernel (survey/expect.py).
        busy: whether something disturbed the machine each time speed was measured, so that it is not to be trusted
            (survey/steady.py).
    """

    scheme: str
    method: str
    bits_per_weight: float | None = None
    bytes: int | None = None
    perplexity: float | None = None
    kl: float | None = None
    top1: float | None = None
    tokens_per_second: float | None = None
    path: Service = "refused"
    why: str = ""
    speedup: float | None = None
    decode_error: float | None = None
    seconds: float | None = None
    dtype: str | None = None
    busy: bool = False
    window_path: Service | None = None
    quantize_seconds: float | None = None
    expected: float | None = None

    @property
    def beside(self) -> float | None:
        """The original's tokens a second in the same race."""
        return self.tokens_per_second / self.speedup if self.tokens_per_second and self.speedup else None

    @property
    def doubt(self) -> str:
        """What a speed is marked with."""
        return "?" if self.busy else ""

    @property
    def planned(self) -> float | None:
        """What was expected of the speedup; None where no native kernel ran, of which alone something is expected."""
        return self.expected if self.path == "native" else None

    @property
    def reason(self) -> str:
        """`why`, and what a native kernel was expected to do where none ran."""
        missed = self.planned is None and self.expected is not None
        return f"{self.why}; a native kernel is planned at {self.expected:.2f}x" if missed else self.why

    @property
    def label(self) -> str:
        """What to call it: the scheme, and the method where it is not rounding to nearest."""
        return self.scheme if self.method == "rtn" else f"{self.scheme} {self.method}"


@dataclass(frozen=True)
class Recommendation(_Plain):
    """One scheme ("original" to keep the model as it is), a sentence with the reason, and the method."""

    scheme: str
    reason: str
    method: str = "rtn"

    @property
    def label(self) -> str:
        """What to call it, as `Row.label`."""
        return self.scheme if self.method == "rtn" else f"{self.scheme} {self.method}"

    def names(self, row: Row) -> bool:
        """Whether it is this row."""
        return (row.scheme, row.method) == (self.scheme, self.method)


@dataclass(frozen=True)
class Result:
    """A whole survey."""

    identity: Identity
    machine: dict[str, Any]
    original: Original
    rows: list[Row] = field(default_factory=list)
    recommendation: Recommendation | None = None
