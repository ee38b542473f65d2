"""scripts/bench_start.py: what it refuses before it starts anything."""

import importlib

import pytest


@pytest.mark.parametrize("options", [["--batch", "4"], ["--split", "3", "3"], ["--split"]])
def test_sizes_that_are_not_the_batch_are_refused_before_a_process_starts(
    options, monkeypatch, capsys
):
    monkeypatch.syspath_prepend("scripts")
    bench_start = importlib.import_module("bench_start")
    monkeypatch.setattr("sys.argv", ["bench_start.py", *options])
    monkeypatch.setattr(bench_start, "run", None)
    with pytest.raises(SystemExit):
        bench_start.main()
    assert "adds up to" in capsys.readouterr().err
