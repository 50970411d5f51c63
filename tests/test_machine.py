"""What this machine is: asked lazily, said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nybble import machine
from nybble.errors import BadInput


def test_the_cpu_describes_itself() -> None:
    found = machine.describe("cpu")
    assert (found.device, found.capability, found.torch) == ("cpu", None, torch.__version__)
    assert found.units == torch.get_num_threads()
    assert found.memory > 1 << 28
    assert found.name in found.sentence()
    assert found.as_dict()["name"] == found.name


@pytest.mark.parametrize(("threads", "said"), [(1, "1 thread;"), (2, "2 threads;")])
def test_the_sentence(threads: int, said: str) -> None:
    made = machine.Machine("cpu", "a cpu", threads, 2 << 30, None, ("avx2",), "2.13", "Linux x86_64")
    assert f"a cpu; {said} 2 GiB; avx2; torch 2.13; Linux x86_64" == made.sentence()


def test_a_gpu_says_its_capability() -> None:
    made = machine.Machine("cuda", "a gpu", 132, 139 << 30, (9, 0), (), "2.11", "Linux x86_64")
    assert "132 multiprocessors; 139 GiB; compute capability 9.0;" in made.sentence()


def test_devices() -> None:
    assert machine.find_device("cpu") == torch.device("cpu")
    assert machine.find_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(BadInput, match="unknown device 'abacus'; known here: cpu"):
        machine.find_device("abacus")
    with pytest.raises(BadInput, match="no mps device can be used here; usable: cpu"):
        machine.find_device("mps")
    with pytest.raises(BadInput, match="cuda"):
        machine.find_device("cuda:99")


def test_threads_tell_how_long_they_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = tmp_path / "task"
    monkeypatch.setattr(machine, "Path", lambda path: {"/proc/self/task": tasks}[path])
    assert machine.waited() == {}, "a system that has no such files"
    for thread, line in (("41", "9000000000 250000000 77\n"), ("42", "1 0 1\n")):
        (tasks / thread).mkdir(parents=True)
        (tasks / thread / "schedstat").write_text(line)
    (tasks / "43" / "schedstat").mkdir(parents=True)
    assert machine.waited() == {"41": 0.25, "42": 0.0}, "one that cannot be read is left out"


def test_a_system_without_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Path", lambda path: type("P", (), {"is_file": staticmethod(lambda: False)}))
    machine.describe.cache_clear()
    try:
        assert machine.describe("cpu").features == ()
    finally:
        machine.describe.cache_clear()
