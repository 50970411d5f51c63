"""The command line: one thin function a command, and one way to end.

Exit codes: 0 done, 1 an error of nybble itself (with its traceback), 2 something in the request that cannot be worked
with (one message, no traceback), 3 compared and not right (judge, fingerprint), 130 stopped by Ctrl-C. Commands are
imported when they run, so that `nybble --help` and `nybble formats` load no torch.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import nybble
from nybble.errors import NybbleError, UnknownName

STOPPED = 130
MODEL = "a Hugging Face directory, a .gguf file, or smollm2-135m"
_DTYPES = ("float32", "bfloat16", "float16")
_ON_GPU = "on a GPU the model's own if it has 16 bits, else bfloat16"
METHODS = "rtn, four_over_six, gptq, schur, awq, smoothquant, hadamard, distill"
_PROMISES = ("run-to-run", "batch-invariant", "cross-machine")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (argparse's own endings raise SystemExit)."""
    try:
        options = _parse(list(sys.argv[1:] if argv is None else argv))
        with _warnings_as_lines():
            code: int | None = options.run(options)
        sys.stdout.flush()
        return code or 0
    except NybbleError as error:
        _say(f"nybble: {error}")
        return 2
    except KeyboardInterrupt:
        _say("nybble: stopped")
        return STOPPED
    except BrokenPipeError:  # the reader went away (`nybble formats | head`); nothing more can be said there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _say(message: str) -> None:
    sys.stderr.write(message + "\n")


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Warnings as one line each, like errors: a user of a command is not helped by a place in our code."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *place: f"nybble: warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = usual


class _Parser(argparse.ArgumentParser):
    """argparse, with the nearest names for an option that does not exist, and no abbreviations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            word = message.split()[2].split("=")[0]
            known = [flag for action in self._actions for flag in action.option_strings]
            near = difflib.get_close_matches(word, known, n=2, cutoff=0.5)
            message += f"; nearest: {', '.join(near)}" if near else ""
        super().error(message)


def _parse(arguments: list[str]) -> argparse.Namespace:
    """The options; an unknown command raises UnknownName with the nearest."""
    parser, commands = _parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        raise UnknownName("command", arguments[0], commands)
    if arguments and arguments[0] == "bench":  # has options of its own
        return argparse.Namespace(run=_bench, rest=arguments[1:])
    if not arguments:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    if arguments[0] in commands:
        return commands[arguments[0]].parse_args(arguments[1:])
    return parser.parse_args(arguments)


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(prog="nybble", description="How few bits can your model take, and is it really faster here?")
    parser.add_argument("--version", action="version", version=f"nybble {nybble.__version__}")
    chosen: Any = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    commands: dict[str, _Parser] = {}
    for name, (text, add) in _COMMANDS.items():
        commands[name] = chosen.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        add(commands[name])
    return parser, commands


def _late(module: str, function: str) -> Callable[[argparse.Namespace], int | None]:
    """A command that is imported when it runs."""

    def run(options: argparse.Namespace) -> int | None:
        command: Callable[[argparse.Namespace], int | None] = getattr(import_module(module), function)
        return command(options)

    return run


def _bench(options: argparse.Namespace) -> int | None:
    return _late("nybble.cli.models", "bench")(options)


def _add_survey(p: _Parser) -> None:
    p.add_argument("model", metavar="MODEL", help=MODEL)
    p.add_argument("--schemes", nargs="+", metavar="SCHEME", help="which, separated by spaces or commas (default: 22)")
    p.add_argument("--methods", "--method", type=_names, default=["rtn"], metavar="METHOD,METHOD,…",
                   help="how weights are rounded, each with every scheme (default: rtn, to nearest)")  # fmt: skip
    p.add_argument(
        "--tokens", type=_count, default=4096, help="of the text's end to measure quality on (default: 4096)"
    )
    p.add_argument("--text", metavar="FILE", help="UTF-8 text to measure on (default: Python's own help topics)")
    _add_device(p)
    p.add_argument("--dtype", default="auto", choices=("auto", *_DTYPES),
                   help=f"of quality and speed; auto: {_ON_GPU}; on a CPU float32 for quality and the original's "
                        "faster dtype for speed")  # fmt: skip
    p.add_argument("--seed", type=int, default=0, help="for methods that draw numbers (default: 0)")
    p.add_argument("-o", "--out", type=Path, default=Path(), metavar="DIR", help="for results (default: this folder)")
    p.add_argument("--max-kl", type=_positive, help="worst KL to recommend, nats a token (default: 0.02)")
    p.add_argument("--max-bytes", type=_size, help="largest size to recommend: 120MB, 1.5GB, or bytes (default: any)")
    p.add_argument("--force", action="store_true", help="start over, replacing a survey in DIR")
    p.add_argument("--explain", action="store_true", help="say of each scheme what serves it, or why nothing native")
    p.set_defaults(run=_late("nybble.cli.models", "survey"))


def _add_quantize(p: _Parser) -> None:
    p.add_argument("model", metavar="MODEL", help=MODEL)
    p.add_argument("scheme", metavar="SCHEME", help="W4A16, NVFP4, …")
    p.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="a new folder for the checkpoint")
    p.add_argument("--method", default="rtn",
                   help=f"how weights are rounded: {METHODS}; or several, the one that rounds last, as in "
                        "smoothquant+gptq (default: rtn, to nearest)")  # fmt: skip
    p.add_argument("--ignore", nargs="+", default=["lm_head"], metavar="NAME",
                   help="layers to leave alone, by name or re:pattern (default: lm_head)")  # fmt: skip
    p.add_argument("--override", nargs="+", default=[], metavar="PATTERN=SCHEME",
                   help="another scheme for some layers, or none to leave them: '*.v_proj=W4A8_G32' 'down_proj=none'; "
                        "the last that matches decides")  # fmt: skip
    p.add_argument("--set", nargs="+", default=[], metavar="METHOD.SETTING=VALUE",
                   help="a method's settings: gptq.act_order=false, hadamard.plain=true, distill.lr=1e-4")  # fmt: skip
    p.add_argument("--calibration", metavar="FILE",
                   help="UTF-8 text to learn from (default: Python's own help topics, but for their end)")  # fmt: skip
    p.add_argument("--samples", type=_count, metavar="N",
                   help="windows of 512 tokens from that text's end (default: 32, or 2 to find ranges)")  # fmt: skip
    p.add_argument("--work-dir", type=Path, metavar="DIR", help="for finished blocks: the same command goes on there")
    p.add_argument("--offload", action="store_true", help="keep the model in main memory, bring block by block")
    p.add_argument("--spill", metavar="cpu|DIR", help="for what enters the blocks (default: it stays on the device)")
    _add_device(p)
    p.add_argument(
        "--dtype", choices=_DTYPES, help="of what is not quantized (default: the model's own, bfloat16 for .gguf)"
    )
    p.set_defaults(run=_late("nybble.cli.quantize", "quantize"))


def _add_generate(p: _Parser) -> None:
    p.add_argument("model", metavar="DIR", help=MODEL)
    p.add_argument("prompt", help="text to continue")
    p.add_argument("--tokens", type=_count, default=64, help="at most so many new ones (default: 64)")
    _add_device(p)
    p.add_argument("--dtype", choices=_DTYPES,
                   help=f"of activations (default: {_ON_GPU}; on a CPU the model's own; with a promise its own, or "
                        "bfloat16 for .gguf, on every device)")  # fmt: skip
    p.add_argument("--promise", choices=_PROMISES, help="about equal bits; refused where it cannot be kept")
    p.add_argument("--temperature", type=_positive, help="draw tokens, by --seed and nothing else (default: greedy)")
    p.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    p.set_defaults(run=_late("nybble.cli.promises", "generate"))


def _add_fingerprint(p: _Parser) -> None:
    p.add_argument("model", metavar="MODEL", help=MODEL)
    chosen = p.add_mutually_exclusive_group(required=True)
    chosen.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the fingerprint")
    chosen.add_argument("--check", type=Path, metavar="FILE", help="compute it again and compare")
    p.add_argument("--promise", choices=_PROMISES, default="cross-machine", help="(default: cross-machine)")
    p.add_argument("--prompt", default="The three laws of robotics are", help="text to continue")
    p.add_argument("--tokens", type=_count, default=256, help="to decode greedily (default: 256)")
    p.add_argument("--dtype", choices=_DTYPES,
                   help="of activations and of weights that are not quantized (default: the model's own, bfloat16 for "
                        ".gguf; with --check the file's)")  # fmt: skip
    _add_device(p)
    p.set_defaults(run=_late("nybble.cli.promises", "fingerprint"))


def _add_evaluate(p: _Parser) -> None:
    p.add_argument("model", metavar="DIR", help=MODEL)
    p.add_argument("--reference", metavar="MODEL", help="the original, for KL and agreement")
    p.add_argument("--tokens", type=_count, default=4096, help="of the text's end (default: 4096)")
    p.add_argument("--text", metavar="FILE", help="UTF-8 text (default: Python's own help topics)")
    _add_device(p)
    p.add_argument("--dtype", choices=_DTYPES,
                   help=f"of activations (default, as a survey: {_ON_GPU}; on a CPU float32)")  # fmt: skip
    p.set_defaults(run=_late("nybble.cli.models", "evaluate"))


def _add_formats(p: _Parser) -> None:
    p.add_argument("name", nargs="?", metavar="NAME", help="one format: e2m1, nvfp4, int4_g64_asym, …")
    p.set_defaults(run=_late("nybble.cli.tables", "formats"))


def _add_ops(p: _Parser) -> None:
    p.add_argument("name", nargs="?", metavar="NAME", help="one op: linear, …")
    p.add_argument("--m", type=_count0, default=1, help="rows of x, tokens (default: 1)")
    p.add_argument("--n", type=_count, default=1024, help="outputs (default: 1024)")
    p.add_argument("--k", type=_count, default=1024, help="inputs (default: 1024)")
    p.add_argument("--format", help="the weight's format, with every implementation's answer (default: every scheme)")
    p.add_argument("--activation", help="the format activations are rounded to")
    p.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of x (default: bfloat16)")
    p.add_argument("--device", help="cpu, cuda, … (default: a GPU where there is one)")
    p.set_defaults(run=_late("nybble.cli.tables", "ops"))


def _add_plan(p: _Parser) -> None:
    p.add_argument("target", metavar="MODEL|NxK", help=f"{MODEL}, or a weight's shape: 28672x8192")
    p.add_argument("--machine", default="here", metavar="NAME", help="of the table, a .toml file, or here (default)")
    p.add_argument("--tokens", type=_counts, default=[1, 16, 2048], metavar="M,M,…",
                   help="that go through at once (default: 1,16,2048)")  # fmt: skip
    p.add_argument("--schemes", nargs="+", metavar="SCHEME", help="which to compare with bf16 (default: 15)")
    p.add_argument("--context", type=_count, default=4096, help="tokens whose keys and values are kept (default: 4096)")
    p.add_argument("--budget-gib", type=_positive, help="for weights and cache (default: the machine's memory)")
    p.add_argument("--plot", type=Path, metavar="FILE", help="time against M as a picture (.png, .svg, .pdf)")
    p.add_argument("--json", action="store_true", help="print JSON instead of the table")
    p.set_defaults(run=_late("nybble.cli.plan", "plan"))


def _add_machine(p: _Parser) -> None:
    p.add_argument("name", nargs="?", metavar="NAME", help="one machine, a .toml file, or here (default: the table)")
    p.add_argument("--measure", action="store_true", help="measure this machine, a minute at most, and keep it")
    p.add_argument("--example", action="store_true", help="print a .toml file that describes a machine")
    p.set_defaults(run=_late("nybble.cli.plan", "machine"))


def _add_judge(p: _Parser) -> None:
    p.add_argument("problem", metavar="PROBLEM", help="FILE.py with Model and get_inputs; FILE.py:FUNCTION; op:NAME")
    p.add_argument("candidate", metavar="CANDIDATE", help="FILE.py with ModelNew; FILE.py:NAME; MODULE:NAME")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the verdict as JSON")
    p.add_argument("--html", type=Path, metavar="FILE", help="write it as a page, with the evidence")
    p.add_argument("--baseline", default="eager", metavar="NAMES", help="eager,compile,graph (default: eager)")
    p.add_argument("--seed", type=int, help="of an earlier verdict: the same questions again (default: a new one)")
    p.add_argument("--checks", metavar="NAMES", help="only these, separated by commas (default: all)")
    p.add_argument("--own-kernels", action="store_true", help="handing the work to the framework is cheating")
    p.add_argument("--rounds", type=_count, default=8, help="of timing (default: 8)")
    _add_device(p)
    p.set_defaults(run=_late("nybble.cli.judge", "judge"))


def _add_bench(p: _Parser) -> None:
    p.add_argument("rest", nargs=argparse.REMAINDER, help="see nybble bench --help")


def _add_device(p: _Parser) -> None:
    p.add_argument("--device", help="cpu, cuda, cuda:1, … (default: a GPU where there is one)")


_COMMANDS: dict[str, tuple[str, Callable[[_Parser], None]]] = {
    "survey": ("measure every scheme's quality, bytes and speed on this machine, and recommend one", _add_survey),
    "quantize": ("write a quantized checkpoint that transformers and vLLM load", _add_quantize),
    "generate": ("continue a prompt", _add_generate),
    "fingerprint": ("write what a model computes, op by op, or compare it with another machine's", _add_fingerprint),
    "evaluate": ("measure perplexity, and KL and agreement against the original", _add_evaluate),
    "formats": ("list the number formats, or every code of one", _add_formats),
    "ops": ("tell which implementation of an op runs here, and why not the others", _add_ops),
    "plan": ("predict every scheme's speed on a machine, before trying", _add_plan),
    "machine": ("show the rates that predictions rest on, or measure this machine's", _add_machine),
    "judge": ("tell whether a kernel is right, and then how fast it is", _add_judge),
    "bench": ("time our kernels beside their rivals", _add_bench),
}


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _counts(text: str) -> list[int]:
    return [_count(word) for word in text.split(",") if word]


def _names(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


_counts.__name__ = "list of counts"  # argparse names the type in its messages


def _count0(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def _size(text: str) -> int:
    number = text.rstrip("BbKkMmGgIi ")
    unit = text[len(number) :].strip().lower()
    if unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r}: a size is a number with {', '.join(u for u in _UNITS if u)}")
    try:
        return int(_positive(number) * _UNITS[unit])
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; 120MB is one") from error


for _type, _name in ((_count, "count"), (_count0, "count"), (_positive, "number"), (_size, "size")):
    _type.__name__ = _name  # argparse names the type in its messages
