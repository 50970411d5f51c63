"""THE TABLE of machines: peak rates, each row with its source. A file describes a machine that is not here.

Rates are dense (no sparsity) and theoretical, unless measured ceilings replace them (`nybble machine --measure`);
those are marked with their date. Scalar rates are lanes of a multiprocessor x multiprocessors x clock, with the lanes
of the CUDA C++ Programming Guide's table of arithmetic throughput; conversions of 32-bit integers run at 16 lanes
where the compiler emits I2F (sm_80) and at 64 where it emits I2FP (sm_86 and later).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nybble.errors import BadInput, UnknownName
from nybble.planner.lines import Lines

T, G = 1e12, 1e9
UNITS = ("fp64", "fp32", "bf16", "fp8", "mxfp8", "fp4", "int8", "int4")
SCALARS = ("float", "logic", "shift", "convert", "int32", "fp64")


@dataclass(frozen=True)
class Machine:
    """What a prediction needs to know of a machine.

    Attributes:
        name: as users type it.
        title: in full.
        memory: bytes.
        bandwidth: bytes a second.
        units: multiply unit -> operations a second (a multiply-add is two); what is missing does not exist here.
        scalars: instruction class -> instructions a second.
        launch: seconds that a kernel costs however little it does.
        source: where the figures are from.
        uncertain: what of it is not in that source, and what it rests on.
        measured: figure -> date on which it was measured here.
        shared: whether products run on the scalar units, so that decoding and multiplying take turns.
        lines: what real kernels add, where it was measured (lines.py).
    """

    name: str
    title: str
    memory: float
    bandwidth: float
    units: Mapping[str, float]
    scalars: Mapping[str, float]
    launch: float
    source: str
    uncertain: tuple[str, ...] = ()
    measured: Mapping[str, str] = field(default_factory=dict)
    shared: bool = False
    lines: Lines = field(default_factory=dict)

    def __post_init__(self) -> None:
        rates = {"memory": self.memory, "bandwidth": self.bandwidth, **self.units, **self.scalars}
        wrong = [f"{name} = {value!r}" for name, value in rates.items() if not 0 < value < math.inf]
        wrong += [f"launch = {self.launch!r}"] if not 0 <= self.launch < math.inf else []
        unknown = [u for u in self.units if u not in UNITS] + [s for s in self.scalars if s not in SCALARS]
        if wrong or unknown:
            raise BadInput(f"machine {self.name!r}: {', '.join([*wrong, *(f'unknown unit {u!r}' for u in unknown)])}")

    def as_dict(self) -> dict[str, Any]:
        """The attributes as JSON can hold them."""
        return asdict(self)


TABLE: dict[str, Machine] = {}
_LAUNCH = 2.5e-6
_LAUNCH_NOTE = "launch: 2.5 us assumed, the order of an empty kernel in a CUDA graph"


def _add(row: Machine) -> None:
    TABLE[row.name] = row


def _nvidia(
    name: str, title: str, gb: float, gbs: float, sm: int, ghz: float, lanes: str, units: dict[str, float],
    source: str, *uncertain: str,
) -> None:  # fmt: skip
    """A row of teraflops and gigabytes. `lanes`: float, logic, shift, convert lanes of a multiprocessor."""
    per_lane = sm * ghz * G
    counts = dict(zip(("float", "logic", "shift", "convert"), map(int, lanes.split()), strict=True))
    scalars = {kind: count * per_lane for kind, count in counts.items()}
    scalars["int32"] = 64 * per_lane
    if "fp64" in units:
        # the vector rate, half of the tensor cores' where those exist (A100, H100, H200)
        scalars["fp64"] = units["fp64"] * T / (4 if name in ("a100", "h100", "h200") else 2)
    rates = {unit: rate * T for unit, rate in units.items()}
    notes = (*uncertain, _LAUNCH_NOTE)
    _add(Machine(name, title, gb * G, gbs * G, rates, scalars, _LAUNCH, source, notes, shared="bf16" not in units))


_nvidia("a100", "NVIDIA A100 SXM4 80 GB", 80, 2039, 108, 1.41, "64 64 64 16",
        {"fp64": 19.5, "fp32": 19.5, "bf16": 312, "int8": 624, "int4": 1248},
        "NVIDIA A100 datasheet and GA100 whitepaper")  # fmt: skip
_nvidia("h100", "NVIDIA H100 SXM5 80 GB", 80, 3350, 132, 1.98, "128 64 64 64",
        {"fp64": 67, "fp32": 67, "bf16": 989, "fp8": 1979, "int8": 1979},
        "NVIDIA H100 datasheet (tensor figures there are with sparsity)")  # fmt: skip
_nvidia("h200", "NVIDIA H200 SXM5 141 GB", 141, 4800, 132, 1.98, "128 64 64 64",
        {"fp64": 67, "fp32": 67, "bf16": 989, "fp8": 1979, "int8": 1979},
        "NVIDIA H200 datasheet (tensor figures there are with sparsity)")  # fmt: skip
_nvidia("b200", "NVIDIA B200 SXM 180 GB", 180, 8000, 148, 1.85, "128 64 64 64",
        {"fp64": 37, "fp32": 75, "bf16": 2250, "fp8": 4500, "mxfp8": 4500, "fp4": 9000, "int8": 4500},
        "NVIDIA HGX B200 datasheet, an eighth of the board",
        "clock and scalar lanes: taken from sm_90's, NVIDIA gives none",
        "int8 is tcgen05's rate; Triton 3.6 compiles int8 products to mma.sync, whose rate NVIDIA "
        "does not give")  # fmt: skip
_nvidia("b300", "NVIDIA B300 SXM 288 GB", 288, 8000, 148, 1.92, "128 64 64 64",
        {"fp64": 1.25, "fp32": 75, "bf16": 2250, "fp8": 4500, "mxfp8": 4500, "fp4": 13500},
        "NVIDIA HGX B300 datasheet, an eighth of the board",
        "int8 is left out: sm_103 has no tcgen05 int8 product (triton-lang/triton pull request 9773)",
        "clock and scalar lanes: taken from sm_90's, NVIDIA gives none")  # fmt: skip
_nvidia("l4", "NVIDIA L4 24 GB", 24, 300, 58, 2.04, "128 64 64 64",
        {"fp32": 30.3, "bf16": 121, "fp8": 242.5, "int8": 242.5},
        "NVIDIA L4 datasheet (tensor figures there are with sparsity)",
        "int4 is left out: the datasheet gives none")  # fmt: skip
_nvidia("l40s", "NVIDIA L40S 48 GB", 48, 864, 142, 2.52, "128 64 64 64",
        {"fp32": 91.6, "bf16": 362, "fp8": 733, "int8": 733, "int4": 733}, "NVIDIA L40S datasheet")  # fmt: skip
_nvidia("a10g", "NVIDIA A10G 24 GB", 24, 600, 80, 1.71, "128 64 64 64",
        {"fp32": 35, "bf16": 70, "int8": 140, "int4": 280}, "NVIDIA A10G datasheet (Amazon EC2 G5)")  # fmt: skip
_nvidia("a40", "NVIDIA A40 48 GB", 48, 696, 84, 1.74, "128 64 64 64",
        {"fp32": 37.4, "bf16": 149.7, "int8": 299.3, "int4": 598.7}, "NVIDIA A40 datasheet")  # fmt: skip
_nvidia("rtx3090", "NVIDIA GeForce RTX 3090 24 GB", 24, 936, 82, 1.695, "128 64 64 64",
        {"fp32": 35.6, "bf16": 71, "int8": 284, "int4": 568},
        "NVIDIA GA102 whitepaper; bf16 with float32 accumulation, half of the float16 rate")  # fmt: skip
_nvidia("rtx4090", "NVIDIA GeForce RTX 4090 24 GB", 24, 1008, 128, 2.52, "128 64 64 64",
        {"fp32": 82.6, "bf16": 165.2, "fp8": 330.3, "int8": 660.6, "int4": 1321.2},
        "NVIDIA Ada whitepaper; bf16 and fp8 with float32 accumulation")  # fmt: skip
_nvidia("rtx5090", "NVIDIA GeForce RTX 5090 32 GB", 32, 1792, 170, 2.41, "128 128 64 64",
        {"fp32": 104.8, "bf16": 209.5, "fp8": 419, "mxfp8": 419, "fp4": 1676, "int8": 838},
        "NVIDIA RTX Blackwell whitepaper; bf16 and fp8 with float32 accumulation",
        "mxfp8: taken to run at fp8's rate")  # fmt: skip
_nvidia("rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell Workstation 96 GB", 96, 1792, 188, 2.6, "128 128 64 64",
        {"fp32": 125, "bf16": 503.8, "fp8": 1007.6, "mxfp8": 1007.6, "fp4": 2015, "int8": 1007.6},
        "NVIDIA RTX PRO Blackwell whitepaper; with float32 accumulation",
        "mxfp8: taken to run at fp8's rate")  # fmt: skip
_nvidia("orin-nano", "NVIDIA Jetson Orin Nano 8 GB", 8, 68, 8, 0.625, "128 64 64 64",
        {"fp32": 1.28, "bf16": 10, "int8": 20},
        "NVIDIA Jetson Orin Nano datasheet: 40 TOPS with sparsity", "bf16: half of int8's rate")  # fmt: skip
_nvidia("c2075", "NVIDIA Tesla C2075 6 GB (Fermi, 2011)", 6, 144, 14, 1.15, "32 32 16 16",
        {"fp64": 0.515, "fp32": 1.03}, "NVIDIA Tesla C2075 board specification, ECC off",
        "lanes: compute capability 2.0 in the CUDA C Programming Guide's table")  # fmt: skip

_AMD_NOTE = "scalar classes other than float: taken to run at the vector units' float32 rate"


def _amd(name: str, title: str, gb: float, gbs: float, units: dict[str, float], source: str, *uncertain: str) -> None:
    float_rate = units["fp32"] * T / 2
    scalars = dict.fromkeys(("float", "logic", "shift", "convert", "int32"), float_rate)
    scalars["fp64"] = units["fp64"] * T / 4
    rates = {unit: rate * T for unit, rate in units.items()}
    _add(Machine(name, title, gb * G, gbs * G, rates, scalars, _LAUNCH, source, (*uncertain, _AMD_NOTE, _LAUNCH_NOTE)))


_amd("mi300x", "AMD Instinct MI300X 192 GB", 192, 5300,
     {"fp64": 163.4, "fp32": 163.4, "bf16": 1307.4, "fp8": 2614.9, "int8": 2614.9}, "AMD MI300X datasheet")  # fmt: skip
_amd("mi350", "AMD Instinct MI350X 288 GB", 288, 8000,
     {"fp64": 72.1, "fp32": 144.2, "bf16": 2306.9, "fp8": 4613.8, "mxfp8": 4613.8, "fp4": 9227.5, "int8": 4613.8},
     "AMD MI350X datasheet", "fp4: MXFP4 only, groups of 32")  # fmt: skip

_VECTOR = ("float", "logic", "shift", "convert", "int32")
_add(Machine(
    "m4", "Apple M4, 10-core GPU, 16 GB", 16 * G, 120 * G, {"fp32": 3.02 * T, "bf16": 3.02 * T},
    dict.fromkeys(_VECTOR, 2.1 * T), 2e-4,
    "bandwidth and memory: Apple's M4 specification; products: 3.02 TFLOP/s, measured by others "
    "(an M4 re-implementation of arXiv 2607.22785)",
    ("scalars: half of 4.2 TFLOP/s float32, no vendor figure", "launch: 0.2 ms assumed for a Metal command buffer"),
    shared=True,
))  # fmt: skip
_add(Machine(
    "epyc-2c", "AMD EPYC (Zen 5), 2 cores, AVX-512 VNNI and BF16", 24 * G, 30.5 * G,
    {"fp64": 0.0378 * T, "fp32": 0.0654 * T, "bf16": 0.286 * T, "int8": 0.33 * T}, dict.fromkeys(_VECTOR, 0.166 * T),
    3.7e-6, "measured on a two-core virtual machine with torch 2.13, 30 Nov 2026: products of 2048 cubed, the best of "
    "three runs on a busy machine; bandwidth: an int8 weight of 8192 x 8192 in 2.2 ms",
    ("scalars: two cores x two 512-bit ports x 2.6 GHz",), shared=True,
))  # fmt: skip

EXAMPLE = """\
name = "my-gpu"
title = "what people call it"
memory_gb = 24
bandwidth_gbs = 936
launch_us = 2.5
source = "where the figures are from"
shared = false      # true where products run on the scalar units (no tensor cores)
[tflops]            # dense; leave out what the machine does not have
fp32 = 35.6         # fp64 fp32 bf16 fp8 mxfp8 fp4 int8 int4
bf16 = 71
int8 = 284
[scalar_tera]       # instructions a second; what is left out runs at float's rate
float = 17.8        # float logic shift convert int32 fp64
convert = 8.9
"""
"""A machine as a file."""


def get(name: str) -> Machine:
    """The machine called `name`, or described by the TOML file of that path.

    Raises:
        UnknownName: neither; the message lists the nearest names and shows how to describe a machine.
        BadInput: the file cannot be read or lacks something.
    """
    path = Path(name)
    if path.suffix == ".toml":
        return from_toml(path)
    key = name.lower().replace(" ", "").replace("_", "-")
    row = TABLE.get(key) or TABLE.get(key.replace("-", ""))
    if row is None:
        raise _Unknown(name)
    return row


class _Unknown(UnknownName):
    def __init__(self, name: str) -> None:
        super().__init__("machine", name, [*TABLE, "here"])
        self.args = (f"{self.args[0]}\nOr describe it in a file and name that (--machine my-gpu.toml):\n{EXAMPLE}",)


def from_toml(path: Path) -> Machine:
    """A machine from a file like EXAMPLE; raises BadInput with what is wrong."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read: {error}; a machine looks like this:\n{EXAMPLE}") from error
    try:
        return _from_facts(found, str(path))
    except KeyError as error:
        raise BadInput(f"{path}: lacks {error.args[0]}; a machine looks like this:\n{EXAMPLE}") from error
    except (TypeError, AttributeError) as error:
        raise BadInput(f"{path}: {error}; a machine looks like this:\n{EXAMPLE}") from error


def _from_facts(found: Mapping[str, Any], source: str) -> Machine:
    """A machine from a file's contents; KeyError for what it lacks, TypeError for what is no number."""
    missing = [key for key in ("name", "memory_gb", "bandwidth_gbs", "tflops", "scalar_tera") if key not in found]
    if missing or "float" not in found["scalar_tera"]:
        raise KeyError(", ".join(missing or ["scalar_tera.float"]))
    given = {kind: rate * T for kind, rate in found["scalar_tera"].items()}
    return Machine(
        name=str(found["name"]),
        title=str(found.get("title", found["name"])),
        memory=found["memory_gb"] * G,
        bandwidth=found["bandwidth_gbs"] * G,
        units={unit: rate * T for unit, rate in found["tflops"].items()},
        scalars={**dict.fromkeys(_VECTOR, given["float"]), **given},
        launch=found.get("launch_us", _LAUNCH * 1e6) * 1e-6,
        source=str(found.get("source", source)),
        shared=bool(found.get("shared")),
    )


def with_measured(row: Machine, ceilings: Mapping[str, float], date: str) -> Machine:
    """The row with measured rates in place of the table's.

    Args:
        row: the table's row.
        ceilings: "bandwidth", "launch", "memory" or a multiply unit -> what was measured.
        date: of the measurement.
    """
    units = {**row.units, **{key: value for key, value in ceilings.items() if key in UNITS}}
    measured = {**row.measured, **dict.fromkeys(ceilings, date)}
    kept = row.uncertain if "launch" not in ceilings else tuple(u for u in row.uncertain if u[:7] != "launch:")
    return replace(
        row,
        memory=ceilings.get("memory", row.memory),
        bandwidth=ceilings.get("bandwidth", row.bandwidth),
        launch=ceilings.get("launch", row.launch),
        units=units,
        measured=measured,
        uncertain=kept,
    )
