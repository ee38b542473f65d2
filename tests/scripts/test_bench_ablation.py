"""scripts/bench_ablation.py: what its bars are called, and that a try on the CPU is short."""

import importlib
import os

import pytest


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend("scripts")
    return importlib.import_module


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((48, 48), "2 equal sub-batches, staggered"),
        ((11, 11, 10), "3 equal sub-batches, staggered"),
        ((16, 16, 15), "3 equal sub-batches, staggered"),
        ((17, 15), "2 unequal sub-batches, staggered"),
        ((22, 10), "2 unequal sub-batches, staggered"),
    ],
)
def test_sizes_that_differ_by_one_row_are_equal(scripts, sizes, name):
    staggers = tuple(range(len(sizes)))
    row = {"sizes": sizes, "staggers": staggers, "overlap": True, "sm_budgets": {}, "unroll": 1}
    assert scripts("benchmarks.ablation.figure")._name(row) == name


def test_a_try_analyses_each_model_once_and_compiles_no_fast_code(scripts, monkeypatch, capsys):
    programs = scripts("benchmarks.ablation.programs")
    asked = {}

    def run(prepare, measure, groups, workers, *, quiet):
        asked.update(workers=workers, groups=groups)
        return iter(())

    monkeypatch.setattr(scripts("benchmarks.pool"), "run", run)
    monkeypatch.setattr("sys.argv", ["bench_ablation.py", "--tiny"])
    scripts("bench_ablation").main()
    assert asked["workers"] <= (os.cpu_count() or 1)
    assert [group.model for group in asked["groups"]] == ["bert", "conformer", "pair"]
    assert {group.tiny for group in asked["groups"]} == {True}
    assert programs._options(overlap=True)["xla_backend_optimization_level"] == 0
    assert '"bench": "ablation"' in capsys.readouterr().out
