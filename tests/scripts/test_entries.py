"""Every script starts by its file name and explains its options; so do processes of the peers."""

import runpy
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = sorted(path.name for path in Path("scripts").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_explains_its_options_without_torch_or_transformers(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend("scripts")
    for library in ("torch", "transformers", "tokamax", "matplotlib"):
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(f"scripts/{name}", run_name="__main__")
    assert end.value.code == 0
    assert f"usage: {name}" in capsys.readouterr().out


@pytest.mark.parametrize("side", ["torch", "onnx"])
def test_process_of_a_peer_finds_its_module_from_anywhere(side, monkeypatch, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("scripts")
        from benchmarks.peers.processes import Worker
        from benchmarks.peers.run import process
    monkeypatch.chdir(tmp_path)
    worker = Worker(process(sys.executable, side), side, ["a mode"], 1)
    worker.wait_ready(time.time() + 60)
    (line,) = worker.release()
    worker.stop()
    assert line["error"].startswith(f"{side}_process.py: error: the following arguments are req")
