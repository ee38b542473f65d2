"""A stage timer that runs nothing, so that tests of whole jobs are fast and repeatable."""

from pbjax.profiling import Timing


class FakeTimer:
    """Takes the place of `timing.StageTimer`; the seconds follow from stage and size alone."""

    def __init__(self, limit=10**9):
        self.stages, self.pairs = [], []
        self._limit = limit

    def install(self, monkeypatch):
        monkeypatch.setattr("pbjax.tables.StageTimer", lambda *_: self)
        return self

    def __call__(self, stage, batch_size):
        if len(self.stages) == self._limit:
            raise KeyboardInterrupt
        self.stages.append((stage.fingerprint, batch_size))
        per_row = 1 + int(stage.fingerprint, 16) % 7
        return Timing(median_s=1e-6 * (5 + per_row * batch_size), spread_s=1e-8, samples=5)

    def pair(self, first, second, batch_size):
        self.pairs.append((first.fingerprint, second.fingerprint, batch_size))
        return 1.0, 1.05


def fake_measure(seconds):
    """A stand-in for `compilation.measure`: seconds by the name of the program."""
    from pbjax.reports import MeasuredProgram

    def measure(programs, leaves, progress):
        return tuple(
            MeasuredProgram(
                name=compiled.way.name,
                sizes=compiled.way.sizes,
                staggers=compiled.way.staggers,
                predicted_s=compiled.way.predicted_s,
                measured_s=seconds[compiled.way.name],
                spread_s=1e-6,
                temporary_bytes=compiled.temporary_bytes,
                weight_bytes=compiled.weight_bytes,
                compile_s=compiled.compile_s,
            )
            for compiled in programs
        )

    return measure
