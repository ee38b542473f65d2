"""Ratios and tables of the peers' benchmark, and its processes: ready, late, broken."""

import dataclasses
import importlib
import io
import json
import re
import sys
import time

import numpy as np
import pytest


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend("scripts")
    return lambda name: importlib.import_module(f"benchmarks.peers.{name}")


def line(side, mode, seconds, **more):
    return {"side": side, "mode": mode, "seconds": seconds, "row": "bert", **more}


def served(rate, met=True):
    return {"server": {"rate_per_s": rate, "met": met, "latency_limit_s": 0.05}}


def test_a_ratio_is_items_of_ours_over_items_of_theirs(script):
    ratio = script("results").ratio
    assert ratio(line("jax", "with_kernels", 0.5), line("torch", "eager", 1.0)) == 2.0


@pytest.mark.parametrize("theirs", [None, {"side": "torch", "mode": "eager", "error": "gone"}])
def test_there_is_no_ratio_over_what_did_not_run(script, theirs):
    assert script("results").ratio(line("jax", "with_kernels", 0.5), theirs) is None


def test_rates_of_servers_compare_only_where_both_met_the_limit(script):
    rate_ratio = script("results").rate_ratio
    ours = line("jax", "with_kernels", 0.5, **served(300.0))
    assert rate_ratio(ours, line("torch", "eager", 1.0, **served(200.0))) == 1.5
    assert rate_ratio(ours, line("torch", "eager", 1.0, **served(0.0, met=False))) is None
    assert rate_ratio(ours, line("torch", "eager", 1.0)) is None
    assert rate_ratio(ours, None) is None


def test_lines_get_rates_and_their_share_of_the_best_peer(script, tmp_path):
    results, rows = script("results"), script("rows")
    row = rows.ROWS["bert"]
    lines = [
        {"side": "jax", "mode": "with_kernels", "seconds": 0.5},
        {"side": "torch", "mode": "eager", "seconds": 1.0},
        {"side": "torch", "mode": "inductor", "seconds": 0.75},
        {"side": "onnx", "mode": "tensorrt", "error": "not there"},
    ]
    for x in lines:
        np.save(tmp_path / f"{x['side']} bert {x['mode']}.npy", np.ones((2, 3)))
    found = results.finish(row, lines, tmp_path)
    assert [x.get("over_best_peer") for x in found] == [1.5, 0.75, 1.0, None]
    assert found[0]["items_per_s"] == 2 * row.batch_size
    assert found[0]["compared_with"] == "jax bert with_kernels"
    assert "items_per_s" not in found[3]


def test_the_table_has_ratios_first_and_says_what_did_not_run(script):
    results, rows = script("results"), script("rows")
    rates = {"items_per_s": 1234.5, "share_of_bound": 0.6}
    lines = [
        line("jax", "library", 0.6, **rates),
        line("jax", "with_kernels", 0.5, **rates, **served(300.0)),
        line("torch", "eager", 1.0, **rates, **served(100.0)),
        {"side": "onnx", "mode": "tensorrt", "row": "bert", "error": "No module named 'tensorrt'"},
    ]
    text = results.table({"bert": rows.ROWS["bert"]}, lines).splitlines()
    cells = re.split(" {2,}", text[2])
    assert cells == ["BERT-Base", "2.00", "-", "1,234.5", "60%", "with_kernels"]
    assert [text[0].index(head) for head in ("row", "ours is")] == [
        text[2].index(cell) for cell in ("BERT-Base", "with_kernels")
    ]
    assert any("eager" in row and "3.00" in row for row in text)
    assert text[-1] == "BERT-Base, tensorrt did not run: No module named 'tensorrt'"


def test_kernels_show_the_fastest_of_theirs_and_the_refusals(script):
    found = {"kernel": "norm", "case": "bert", "ours_s": 1e-5, "agree": True, "mode": "bert"}
    slow = found | {"tokamax_s": {"mosaic": 3e-5, "triton": 2e-5}}
    refused = found | {"case": "vit", "tokamax_s": {"mosaic": "no such GPU"}, "agree": False}
    missing = {"mode": "tokamax", "error": "No module named 'tokamax'"}
    text = script("results").kernel_table([slow, refused, missing]).splitlines()
    assert "2.00" in text[2]
    assert "triton" in text[2]
    assert "TOO LARGE" in text[3]
    assert text[4:] == [
        "vit, mosaic did not run: no such GPU",
        "tokamax did not run: No module named 'tokamax'",
    ]


def start(script, code, modes=("eager",)):
    worker = script("processes").Worker
    return worker([sys.executable, "-c", code], "torch", list(modes), 1)


def test_a_process_measures_when_told(script):
    measured = json.dumps({"side": "torch", "mode": "eager", "seconds": 1.0})
    worker = start(
        script, f"print('READY', flush=True); input(); print('{measured}'); print('DONE')"
    )
    worker.wait_ready(time.time() + 60)
    assert worker.ready
    assert worker.release() == [json.loads(measured)]
    worker.stop()


@pytest.mark.parametrize(
    ("code", "within_s", "reason"),
    [
        ("import no_such_peer", 60, "ModuleNotFoundError: No module named 'no_such_peer'"),
        ("raise SystemExit(3)", 60, "ended with exit code 3"),
        ("import time; time.sleep(60)", 1, "not compiled within the seconds of --ready-within"),
    ],
)
def test_a_process_that_is_not_ready_gives_its_reason_for_every_mode(
    script, code, within_s, reason
):
    worker = start(script, code, ("eager", "inductor"))
    worker.wait_ready(time.time() + within_s)
    assert not worker.ready
    lines = worker.release()
    worker.stop()
    assert [(x["mode"], x["error"]) for x in lines] == [("eager", reason), ("inductor", reason)]


def test_a_process_that_breaks_while_it_measures_keeps_what_it_had_found(script):
    found = json.dumps({"side": "torch", "mode": "eager", "seconds": 1.0})
    code = f"print('READY', flush=True); input(); print('{found}', flush=True); 1 / 0"
    worker = start(script, code, ("eager", "inductor"))
    worker.wait_ready(time.time() + 60)
    first, second = worker.release()
    worker.stop()
    assert first["seconds"] == 1.0
    assert second["error"] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("mode", ["onnxruntime-cuda", "tensorrt"])
def test_a_runtime_that_is_not_installed_is_named(script, monkeypatch, tmp_path, mode):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    module = mode.split("-")[0]
    (tmp_path / f"{module}.py").write_text(f"raise ImportError('no {module} here')")
    reason = script("processes").why_absent(sys.executable, mode)
    assert reason == f"ImportError: no {module} here"


def test_a_provider_that_is_missing_is_named_with_those_that_are_there(
    script, monkeypatch, tmp_path
):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "__version__ = '1.0'\ndef get_available_providers(): return ['CPUExecutionProvider']\n"
    (tmp_path / "onnxruntime.py").write_text(code)
    why_absent = script("processes").why_absent
    assert why_absent(sys.executable, "onnxruntime-cpu") == ""
    reason = why_absent(sys.executable, "onnxruntime-cuda")
    assert reason == (
        "CUDAExecutionProvider is none of onnxruntime 1.0: it has ['CPUExecutionProvider']"
    )


def test_a_meter_takes_medians_of_a_span(script, monkeypatch):
    processes = script("processes")

    def no_command(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(processes.subprocess, "Popen", no_command)
    meter = processes.Meter()
    meter.samples += [(float(i), [1000.0 + i, 600.0, 50.0]) for i in range(10)]
    assert meter.between(2, 4) == {"clock_mhz": 1003.0, "power_w": 600.0, "temperature_c": 50.0}
    assert meter.between(20, 30) == {}
    meter.stop()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scenario", "server"], "no limit of the latency"),
        (["--latency-ms", "5"], "--scenario is offline"),
        (["--scenario", "server", "--latency-ms", "0"], "--latency-ms 0: it must be positive"),
        (["--scenario", "server", "--latency-ms", "nan"], "--latency-ms nan: it must be positive"),
        (["--items", "-3"], "--items -3: it must be positive"),
    ],
)
def test_options_that_do_not_go_together_are_refused(script, capsys, options, message):
    protocol = script("protocol")
    parser = protocol.make_parser("")
    args = parser.parse_args(["--row", "bert", "--outputs", ".", *options])
    with pytest.raises(SystemExit):
        protocol.check_scenario(parser, args)
    assert message in capsys.readouterr().err


def test_compiling_ends_at_the_deadline_and_not_after_the_turn_began(script, monkeypatch):
    protocol = script("protocol")
    protocol.start_deadline(time.time() + 0.05)
    with pytest.raises(TimeoutError, match="not compiled within"):
        time.sleep(20)
    protocol.start_deadline(time.time() + 0.05)
    monkeypatch.setattr(protocol.sys, "stdin", io.StringIO("go\n"))
    protocol.wait_for_turn()
    time.sleep(0.1)


def instant(script, calls):
    """A program that takes a millisecond and counts its calls."""

    def call(inputs):
        calls.append(inputs)
        time.sleep(1e-3)
        return np.full((2, 3), 7.0)

    return script("protocol").Program(
        call=call,
        inputs=["a", "b", "c", "d"],
        upload=lambda index: f"host {index}",
        wait=lambda result: None,
        first_rows=lambda result: result,
    )


def options(script, *given):
    return (
        script("protocol")
        .make_parser("")
        .parse_args(["--row", "bert", "--tiny", "--outputs", ".", *given])
    )


def test_offline_runs_the_items_that_were_asked_for(script, tmp_path):
    protocol, rows = script("protocol"), script("rows")
    row, calls = rows.get_row("bert", tiny=True), []
    args = options(script, "--items", "50")
    found = protocol.measure(instant(script, calls), row, args, tmp_path / "out.npy")
    # 50 items are 10 a group, which are three batches of 4; a group more warms up, a call is saved.
    assert found["calls"] == 15
    assert len(calls) == 15 + 3 + 1
    assert set(calls) == {"a", "b", "c"}
    assert found["seconds"] >= 1e-3
    assert np.load(tmp_path / "out.npy").tolist() == [[7.0] * 3] * 2


def test_a_server_at_a_given_rate_says_whether_it_met_the_limit(script, tmp_path):
    protocol, rows = script("protocol"), script("rows")
    row, calls = rows.get_row("bert", tiny=True), []
    given = ("--scenario", "server", "--queries", "60", "--rate", "2000", "--latency-ms")
    loose = options(script, *given, "5000")
    tight = options(script, *given, "0.5")
    found = protocol.measure(instant(script, calls), row, loose, tmp_path / "out.npy")["server"]
    assert found["met"]
    assert 1 <= found["mean_batch_size"] <= row.batch_size
    assert found["tail_s"] >= found["median_s"] >= 1e-3
    assert {"host 0", "host 1", "host 2", "host 3"} <= set(calls)
    again = protocol.measure(instant(script, calls), row, tight, tmp_path / "out.npy")["server"]
    assert not again["met"]


def test_a_mode_that_fails_in_its_turn_is_reported_and_the_next_is_timed(
    script, monkeypatch, capsys, tmp_path
):
    protocol, rows = script("protocol"), script("rows")
    args = options(script, "--items", "50")
    args.outputs = tmp_path

    def broken(inputs):
        raise ValueError("out\nof memory")

    good = instant(script, [])
    bad = dataclasses.replace(good, call=broken)
    ready = [
        protocol.Ready(mode="bad", program=bad, compile_s=1.0),
        protocol.Ready(
            mode="good", program=good, compile_s=2.0, dtype="float16", more=lambda: {"bytes": 3}
        ),
    ]
    monkeypatch.setattr(protocol.sys, "stdin", io.StringIO("go\n"))
    protocol.finish("torch", ready, rows.get_row("bert", tiny=True), args)
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert (first, last) == ("READY", "DONE")
    failed, timed = map(json.loads, lines)
    assert failed == {"side": "torch", "mode": "bad", "error": "ValueError: out of memory"}
    assert (timed["mode"], timed["compile_s"], timed["dtype"]) == ("good", 2.0, "float16")
    assert timed["bytes"] == 3
    assert (tmp_path / "torch bert good.npy").exists()


@pytest.mark.parametrize("name", ["torch_process", "onnx_process", "tokamax_process"])
def test_help_needs_no_peer(script, monkeypatch, capsys, name):
    for library in ("torch", "transformers", "onnxruntime", "tensorrt", "tokamax", "jax"):
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        script(f"{name}").main()
    assert end.value.code == 0
    assert "--deadline" in capsys.readouterr().out


def test_a_mode_that_fails_is_a_line_and_ends_alone(script, capsys):
    protocol = script("protocol")
    with protocol.attempt("torch", "eager", None):
        raise RuntimeError("no such\nkernel")
    with protocol.attempt("torch", "late", time.time() + 0.05):
        time.sleep(20)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        {"side": "torch", "mode": "eager", "error": "RuntimeError: no such kernel"},
        {
            "side": "torch",
            "mode": "late",
            "error": "TimeoutError: not compiled within the seconds of --ready-within",
        },
    ]
