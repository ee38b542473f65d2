"""Stages, rows and tables for the tests of profiles, and a timer that counts."""

from dataclasses import replace
from hashlib import sha256

from pbjax.device import ResourceClass
from pbjax.planning.profiling import CorunRow, Profile, Row, Run, StageInfo, Timing

from .fakes import provenance

PROVENANCE = provenance(command="pbjax profile")


def stage(name):
    return StageInfo(
        name=name,
        fingerprint=sha256(name.encode()).hexdigest()[:12],
        resource=ResourceClass.CUDA,
        dtype="float32",
        shape=(4, 8),
        flops_per_row=1.0,
        bytes_per_row=1.0,
        weight_bytes=0,
    )


A, B, C = stage("a"), stage("b"), stage("c")


def row(stage, batch_size, median_s=1.0, sm_budget=0):
    return Row.of(stage, batch_size, median_s, sm_budget, samples=5)


corun = CorunRow.of


def profile(*rows, corun=(), **provenance):
    return Profile(provenance=replace(PROVENANCE, **provenance), rows=rows, corun=tuple(corun))


TABLE = profile(
    row(A, 2, 1.0),
    row(A, 8, 4.0),
    row(B, 2, 2.0),
    row(B, 8, 2.0),
    corun=[corun((A, B), (8, 8), (1.25, 1.5))],
)


class FakeTimer:
    """Counts its calls; raises when it has answered `limit` times."""

    def __init__(self, limit=1000):
        self.calls = []
        self.limit = limit

    def __call__(self, run):
        if len(self.calls) == self.limit:
            raise KeyboardInterrupt
        self.calls.append((run.stage.name, run.size))
        return Timing(median_s=run.size * 1.23456e-3, spread_s=1e-6, samples=5)


def runs(summary, sizes, sm_budget=0):
    return [
        Run(stage=stage, batch_size=size, sm_budget=sm_budget)
        for stage in summary.stages
        for size in sizes
    ]


def run(stage, size, sm_budget=0):
    return Run(stage=stage, batch_size=size, sm_budget=sm_budget)


# Look-up
