"""A stage timer that runs nothing, so that tests of whole jobs are fast and repeatable."""

from pbjax.planning.profile_rows import Provenance
from pbjax.planning.profiling import Timing


def provenance(**fields):
    """Where a table of the tests comes from."""
    given = {
        "device_kind": "cpu",
        "driver": "",
        "jax": "0.11.2",
        "commit": "0123456",
        "date": "2025-01-01",
        "clock_mhz": 0,
        "power_limit_w": 0,
        "command": "",
    }
    return Provenance(**given | fields)


class FakeTimer:
    """Takes the place of `timing.StageTimer`; the seconds follow from stage and size alone."""

    def __init__(self, limit=10**9):
        self.stages, self.pairs = [], []
        self._limit = limit

    def install(self, monkeypatch):
        monkeypatch.setattr("pbjax.tuning.measured_table.StageTimer", lambda *_: self)
        return self

    def prepare(self, wanted, progress):
        progress(len(wanted), len(wanted), "")

    def __call__(self, run):
        if len(self.stages) == self._limit:
            raise KeyboardInterrupt
        self.stages.append((run.stage.fingerprint, run.size))
        return Timing(median_s=self._seconds(run), spread_s=1e-8, samples=5)

    def pair(self, first, second):
        self.pairs.append((first.stage.fingerprint, second.stage.fingerprint, first.size))
        slower = 1.05 * max(self._seconds(first), self._seconds(second))
        return Timing(median_s=slower, spread_s=1e-8, samples=5)

    def _seconds(self, run):
        per_row = 1 + int(run.stage.fingerprint, 16) % 7
        return 1e-6 * (5 + per_row * run.size)


def fake_measure(seconds):
    """A stand-in for `compilation.measure`: seconds by the name of the program."""
    from pbjax.runtime.measured_programs import MeasuredProgram

    def measure(programs, leaves, progress):
        return tuple(
            MeasuredProgram(
                name=compiled.spec.name,
                sizes=compiled.spec.sizes,
                staggers=compiled.spec.staggers,
                predicted_s=compiled.spec.predicted_s,
                measured_s=seconds[compiled.spec.name],
                spread_s=1e-6,
                temporary_bytes=compiled.temporary_bytes,
                weight_bytes=compiled.weight_bytes,
                compile_s=compiled.compile_s,
            )
            for compiled in programs
        )

    return measure
