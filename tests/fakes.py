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
    """A stand-in for `autotune.measure`: seconds by the name of the program.

    What a split saves over the whole batch spreads by 2 us over the rounds.
    """
    from pbjax.tuning.workload import TimedProgram

    def rounds(program):
        drift = 1e-6 if program.spec.is_whole else -1e-6
        return tuple(seconds[program.spec.name] + i * drift for i in (-1, 0, 1))

    def measure(workload, programs, progress):
        return [TimedProgram(program=each, seconds=rounds(each)) for each in programs]

    return measure
