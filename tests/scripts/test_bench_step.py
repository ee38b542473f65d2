"""scripts/bench_step.py: turns of its processes, room for them, and what it refuses."""

import importlib
import multiprocessing
from types import SimpleNamespace

import pytest
from flax import nnx

from pbjax.device import find_device
from pbjax.errors import InputError


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("scripts")
        yield SimpleNamespace(
            bench=importlib.import_module("benchmarks.steps.run"),
            case=importlib.import_module("benchmarks.steps.case"),
        )


def test_a_case_waits_for_its_turn_once_between_compiling_and_measuring(scripts, capsys):
    seen = []

    def wait():
        seen.append(capsys.readouterr().err)

    case = "8x16:4+4"
    provenance, row, report = scripts.case.run(case, [case], 1, "again", tiny=True, wait=wait)
    (before,) = seen
    assert f"{case}: compile 3/3" in before
    assert "verify 1/1" not in before
    assert "measure 7/7" not in before
    assert provenance["command"] == "again"
    assert row["sizes"] == (4, 4)
    assert row["seconds"].keys() == {"unsplit", "sequential", "interleaved"}
    assert "LlamaModel.decode" in report
    assert "4+4" in scripts.bench.table([row], 1)


def test_layers_of_the_example_share_a_cache_until_a_call_copies_it(scripts):
    graph, shapes = nnx.split(nnx.eval_shape(lambda: scripts.case.make(3, tiny=True)))
    _, (_, cache) = scripts.case.example(graph, shapes, 4, 8)
    assert len(cache.keys) == len(cache.values) == 3
    assert len({id(x) for x in (*cache.keys, *cache.values)}) == 2


@pytest.mark.parametrize("layers", [6, 24])
def test_cases_that_do_not_fit_together_are_refused_with_the_figures(scripts, layers):
    model = nnx.eval_shape(lambda: scripts.case.make(layers, tiny=False))
    device = find_device("nvidia-h200")
    if layers == 6:  # The default.
        scripts.case.check_memory(scripts.bench.CASES, model, device)
        return
    with pytest.raises(InputError, match=r"one that measures 103.1 GB more; 141.0 GB of"):
        scripts.case.check_memory(scripts.bench.CASES, model, device)


@pytest.mark.parametrize("case", ["1024", "axb", "8x16:4+", "8x16x2"])
def test_what_is_no_case_is_refused(scripts, case):
    with pytest.raises(InputError, match=r"--cases .*: not a case; .*write it as 1024x512"):
        scripts.case.parsed(case)


def test_a_process_that_died_or_failed_ends_the_run_with_its_case(scripts):
    process = SimpleNamespace(join=lambda: None, exitcode=-9)
    end, theirs = multiprocessing.Pipe()
    worker = scripts.bench.Worker("8x16", process, end)
    theirs.send("InputError: what was wrong")
    with pytest.raises(SystemExit, match=r"bench_step\(8x16\): InputError: what was wrong"):
        worker.answer()
    theirs.close()
    with pytest.raises(SystemExit, match=r"bench_step\(8x16\): its process died with -9"):
        worker.answer()


def test_a_program_that_was_not_tried_is_a_dash(scripts):
    row = {
        "batch": 8,
        "context": 16,
        "sizes": (8,),
        "seconds": {"unsplit": 2e-3},
        "bound_s": {"interleaved": 1e-3},
        "overlapped_fraction": 0.0,
        "tokens_per_s_at_32_layers": 1000,
    }
    assert scripts.bench.table([row], 6).splitlines()[-1].split() == [
        "8",
        "16",
        "8",
        "2.000",
        *"---",
        "2.00",
        "0%",
        "1,000",
    ]
