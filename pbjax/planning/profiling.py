"""Finds the rows that a measured table lacks, and fills them through a timer that is passed in.

Each different stage is measured once for each batch size and SM budget, however often the program
repeats it. This module runs nothing on a device. `profile_grid` decides which runs are wanted;
`profile_table` holds the table.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pbjax.errors import InputError
from pbjax.planning.profile_grid import Run as Run
from pbjax.planning.profile_grid import grid as grid
from pbjax.planning.profile_rows import CorunRow as CorunRow
from pbjax.planning.profile_rows import Curve as Curve
from pbjax.planning.profile_rows import Provenance as Provenance
from pbjax.planning.profile_rows import Row as Row
from pbjax.planning.profile_table import Profile as Profile
from pbjax.planning.program_summary import ProgramSummary as ProgramSummary
from pbjax.planning.program_summary import StageInfo as StageInfo

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE.parent / "profiles", _PACKAGE / "_profiles")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Measured seconds of one run or pair.

    Attributes:
      median_s: Median device seconds of one run.
      spread_s: Distance of the quartiles, in seconds.
      samples: How many runs were timed.
    """

    median_s: float
    spread_s: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableRows:
    """The part of a profile that may be used here.

    Attributes:
      profile: The profile; without rows if none may be used.
      warning: One line that names the difference; None if there is none.
    """

    profile: Profile
    warning: str | None


type Timer = Callable[[Run], Timing]
type PairTimer = Callable[[Run, Run], Timing]
type Progress = Callable[[int, int, str], None]


def missing_runs(profile: Profile, runs: Iterable[Run]) -> tuple[Run, ...]:
    """The runs for which a profile has no row, each once."""
    known = {row.key for row in profile.rows}
    return tuple({run.key: run for run in runs if run.key not in known}.values())


def missing_pairs(
    profile: Profile, pairs: Iterable[tuple[Run, Run]]
) -> tuple[tuple[Run, Run], ...]:
    """The pairs for which a profile has no row, each once, whatever the order of the two."""
    known = {row.key for row in profile.corun}
    keyed = {tuple(sorted(run.key for run in pair)): pair for pair in pairs}
    return tuple(pair for key, pair in keyed.items() if key not in known)


def fill(
    profile: Profile,
    runs: Iterable[Run],
    timer: Timer,
    *,
    progress: Progress | None = None,
    on_row: Callable[[Profile], None] | None = None,
) -> Profile:
    """Measures the rows that a profile lacks.

    Args:
      profile: The known rows; they are kept and not measured again.
      runs: The runs that need rows.
      timer: Called as timer(run), in the given order.
      progress: Called as progress(done, total, item) before each measurement and after the last.
      on_row: Called with the table so far after each measurement. Errors and interrupts of the
        timer pass through, so a caller that saves here keeps every finished row.

    Returns:
      The profile with all rows.
    """

    def measure(run: Run, so_far: Profile) -> Profile:
        return replace(so_far, rows=(*so_far.rows, _row(run, timer(run))))

    missing = missing_runs(profile, runs)
    return _fill(profile, missing, [run.label for run in missing], measure, progress, on_row)


def fill_corun(
    profile: Profile,
    pairs: Iterable[tuple[Run, Run]],
    timer: PairTimer,
    *,
    progress: Progress | None = None,
    on_row: Callable[[Profile], None] | None = None,
) -> Profile:
    """Measures the pairs of stages that a profile lacks.

    Args:
      profile: The known rows, those of every stage alone among them; its pairs are kept.
      pairs: The pairs of runs that need rows.
      timer: Called as timer(first, second); gives the seconds until both have ended.
      progress: See `fill`.
      on_row: See `fill`.

    Returns:
      The profile with all rows.

    Raises:
      InputError: A stage was not measured alone.
    """

    def measure(pair: tuple[Run, Run], so_far: Profile) -> Profile:
        row = _corun_row(so_far, pair, timer(*pair).median_s)
        return replace(so_far, corun=(*so_far.corun, row))

    missing = missing_pairs(profile, pairs)
    labels = [f"{a.label} beside {b.label}" for a, b in missing]
    return _fill(profile, missing, labels, measure, progress, on_row)


def usable_rows(profile: Profile, device_kind: str, jax_version: str) -> UsableRows:
    """The part of a profile that may be used on this device with this version of jax.

    Rows of another device kind are left out. Rows of another version of jax, and those of bursts,
    are kept with a warning. Before rows are added, merge an empty profile with the provenance of
    this machine into the usable one: the result then names the origin of all its rows.
    """
    provenance = profile.provenance
    if provenance.device_kind != device_kind:
        return UsableRows(
            profile=replace(profile, rows=(), corun=()),
            warning=f"profile: device_kind differs ({provenance.device_kind!r} in the profile, "
            f"{device_kind!r} here); none of its rows is used; missing rows are measured",
        )
    if provenance.jax != jax_version:
        return UsableRows(
            profile=profile,
            warning=f"profile: jax differs ({provenance.jax} in the profile, {jax_version} here); "
            "its rows are used; delete the file to measure them again",
        )
    if profile.clock == "burst":
        return UsableRows(
            profile=profile,
            warning="profile: its seconds are of bursts, at the highest clock; in a long run an "
            "H200 takes up to a fifth longer; they are not mixed with seconds that are measured "
            "now; measure a new table (`pbjax profile`) for seconds of a long run",
        )
    return UsableRows(profile=profile, warning=None)


def find_profile(
    device_slug: str, model_name: str, folders: Sequence[Path] = _FOLDERS
) -> Path | None:
    """The file of a model's table for a device, if there is one.

    Args:
      device_slug: Slug of the device, as in `Device`.
      model_name: Name of the file without its ending.
      folders: The folders to search, in order: the repository, then the installed package.

    Returns:
      The path of the first file found, or None.

    Raises:
      InputError: A name cannot be part of a path.
    """
    for name in (device_slug, model_name):
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII):
            raise InputError(
                f"find_profile({device_slug!r}, {model_name!r}): {name!r} is not a file name; "
                "letters, digits, _, - and . are allowed; pass the path itself to Profile.load"
            )
    paths = (folder / device_slug / f"{model_name}.json" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def find_profiles(device_slug: str, folders: Sequence[Path] = _FOLDERS) -> tuple[Path, ...]:
    """The files of all models' tables for a device; the first folder wins where names are equal.

    Benchmark results lie beside them; only tables have pairs of stages.
    """
    named: dict[str, Path] = {}
    for folder in folders:
        for path in sorted((folder / device_slug).glob("*.json")):
            if '"corun": [' in path.read_text(encoding="utf-8"):
                named.setdefault(path.name, path)
    return tuple(named.values())


def _fill[Item](
    profile: Profile,
    items: Sequence[Item],
    labels: Sequence[str],
    measure: Callable[[Item, Profile], Profile],
    progress: Progress | None,
    on_row: Callable[[Profile], None] | None,
) -> Profile:
    for done, (item, label) in enumerate(zip(items, labels, strict=True)):
        if progress:
            progress(done, len(items), label)
        profile = measure(item, profile)
        if on_row:
            on_row(profile)
    if progress and items:
        progress(len(items), len(items), "")
    return profile


def _row(run: Run, timing: Timing) -> Row:
    return Row.of(
        run.stage,
        run.size,
        _four_digits(timing.median_s),
        sm_budget=run.sm_budget,
        spread_s=_four_digits(timing.spread_s),
        samples=timing.samples,
    )


def _corun_row(profile: Profile, pair: tuple[Run, Run], together_s: float) -> CorunRow:
    a, b = pair
    alone = [profile.seconds(run.stage, run.size, run.sm_budget) for run in pair]
    slow_a, slow_b = (_four_digits(together_s / seconds) for seconds in alone)
    return CorunRow.of(
        (a.stage, b.stage),
        (a.size, b.size),
        (slow_a, slow_b),
        sm_budgets=(a.sm_budget, b.sm_budget),
    )


def _four_digits(value: float) -> float:
    # Rounded when measured, not when saved: a plan must not depend on whether its table was read.
    return float(f"{value:.4g}")
