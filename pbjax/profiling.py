"""Measuring a program: which rows are missing, and filling them through a timer that is given.

Each different stage is measured once for each batch size, however often the program repeats it. The
timer is injected: this module runs nothing on a device. The table itself stands in `profile_table`.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pbjax.errors import InputError
from pbjax.outline import Outline as Outline
from pbjax.outline import StageInfo as StageInfo
from pbjax.profile_rows import CorunRow as CorunRow
from pbjax.profile_rows import Curve as Curve
from pbjax.profile_rows import Provenance as Provenance
from pbjax.profile_rows import Row as Row
from pbjax.profile_rows import measured_size
from pbjax.profile_table import Profile as Profile

GRID_POINTS = 8
_PACKAGE = Path(__file__).parent
_FOLDERS = (_PACKAGE.parent / "profiles", _PACKAGE / "_profiles")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What a timer found.

    Attributes:
      median_s: Median device seconds of one run.
      spread_s: Distance of the quartiles, in seconds.
      samples: How many runs were timed.
    """

    median_s: float
    spread_s: float
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTiming:
    """What a timer of pairs found: seconds of each beside the other over its seconds alone."""

    slowdowns: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsableRows:
    """What of a profile may be used here.

    Attributes:
      profile: With no rows if none may be used.
      warning: One line naming what differs; None if nothing does.
    """

    profile: Profile
    warning: str | None


type Timer = Callable[[StageInfo, int], Timing]
type PairTimer = Callable[[StageInfo, int, StageInfo, int], PairTiming]
type Progress = Callable[[int, int, str], None]


def grid(batch_size: int) -> tuple[int, ...]:
    """The batch sizes to measure, so that every size up to batch_size can be interpolated.

    Powers of two and three halves of them, nearest below the batch, where kernels have no ragged
    last tile; the smallest size; and the batch itself.

    Args:
      batch_size: Rows of the whole batch.

    Returns:
      At most eight sizes, ascending.
    """
    largest = measured_size(batch_size)
    smooth = (base << power for power in range(1, largest.bit_length()) for base in (2, 3))
    # A size within a tenth of the batch would tell little more than the batch itself.
    below = sorted(size for size in {*smooth, 2, 3} if size * 10 < largest * 9)
    return (*sorted({measured_size(1), *below[-(GRID_POINTS - 2) :], largest}),)


def fill(
    profile: Profile,
    outline: Outline,
    batch_sizes: Iterable[int],
    timer: Timer,
    *,
    sm_budget: int = 0,
    progress: Progress | None = None,
    on_row: Callable[[Profile], None] | None = None,
) -> Profile:
    """Measures the rows that a profile lacks for a program.

    Args:
      profile: What is known; its rows are kept and not measured again.
      outline: The program.
      batch_sizes: The sizes to measure; one row counts as two.
      timer: Called as timer(stage, batch_size), by stage in program order, then by size.
      sm_budget: Written to the rows: what the timer's kernels may fill; 0 for no budget.
      progress: Called as progress(done, total, item) before each measurement and after the last.
      on_row: Called with the table so far after each measurement. What the timer raises, an
        interrupt too, passes through: a caller that saves here keeps every finished row.

    Returns:
      The profile with all rows.
    """
    sizes = sorted({measured_size(size) for size in batch_sizes})
    known = {row.key for row in profile.rows}
    wanted = [(stage, size) for stage in outline.stages for size in sizes]
    missing = [(s, size) for s, size in wanted if (s.fingerprint, sm_budget, size) not in known]

    def measure(item: tuple[StageInfo, int], so_far: Profile) -> Profile:
        row = _row(*item, sm_budget, timer(*item))
        return replace(so_far, rows=(*so_far.rows, row))

    labels = [f"{stage.name} at batch size {size}" for stage, size in missing]
    return _fill(profile, missing, labels, measure, progress, on_row)


def fill_corun(
    profile: Profile,
    pairs: Iterable[tuple[StageInfo, StageInfo]],
    batch_sizes: Iterable[tuple[int, int]],
    timer: PairTimer,
    *,
    sm_budgets: tuple[int, int] = (0, 0),
    progress: Progress | None = None,
    on_row: Callable[[Profile], None] | None = None,
) -> Profile:
    """Measures the pairs of stages that a profile lacks.

    Args:
      profile: What is known; its rows are kept and not measured again.
      pairs: Which stages to run together.
      batch_sizes: For both stages of a pair; one row counts as two.
      timer: Called as timer(stage_a, batch_a, stage_b, batch_b).
      sm_budgets: Written to the rows: what each side's kernels may fill; 0 for no budget.
      progress: As in `fill`.
      on_row: As in `fill`.

    Returns:
      The profile with all rows.
    """
    sizes = sorted({(measured_size(a), measured_size(b)) for a, b in batch_sizes})
    known = {row.key for row in profile.corun}
    missing = []
    for (stage_a, stage_b), (size_a, size_b) in ((p, s) for p in pairs for s in sizes):
        item = (stage_a, size_a, stage_b, size_b)
        key = _corun_row(item, sm_budgets, PairTiming(slowdowns=(1.0, 1.0))).key
        if key not in known:
            known.add(key)
            missing.append(item)

    def measure(item: tuple[StageInfo, int, StageInfo, int], so_far: Profile) -> Profile:
        row = _corun_row(item, sm_budgets, timer(*item))
        return replace(so_far, corun=(*so_far.corun, row))

    labels = [f"{a.name} at {m} beside {b.name} at {n}" for a, m, b, n in missing]
    return _fill(profile, missing, labels, measure, progress, on_row)


def usable_rows(profile: Profile, device_kind: str, jax_version: str) -> UsableRows:
    """What of a profile may be used on this device with this version of jax.

    Seconds of another device kind say nothing here and are left out. Those of another version of
    jax are kept, with a warning. Before rows are added, merge an empty profile with the provenance
    of here into the usable one: it then says where all its rows come from.
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
    return UsableRows(profile=profile, warning=None)


def find_profile(
    device_slug: str, model_name: str, folders: Sequence[Path] = _FOLDERS
) -> Path | None:
    """The file of a model's table for a device, if there is one.

    Args:
      device_slug: As in `Device.slug`.
      model_name: Name of the file without its ending.
      folders: Where to look, in order: the repository, then the installed package.

    Returns:
      The path of the first file found, or None.

    Raises:
      InputError: A name cannot be part of a path.
    """
    for name in (device_slug, model_name):
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII):
            raise InputError(
                f"find_profile({device_slug!r}, {model_name!r}): {name!r} is no file name; "
                "letters, digits, _, - and . are allowed; pass the path itself to Profile.load"
            )
    paths = (folder / device_slug / f"{model_name}.json" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


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


def _row(stage: StageInfo, size: int, sm_budget: int, timing: Timing) -> Row:
    return Row(
        stage=stage.name,
        fingerprint=stage.fingerprint,
        resource=stage.resource,
        dtype=stage.dtype,
        batch_size=size,
        shape=stage.shape,
        sm_budget=sm_budget,
        median_s=_four_digits(timing.median_s),
        spread_s=_four_digits(timing.spread_s),
        samples=timing.samples,
    )


def _corun_row(
    item: tuple[StageInfo, int, StageInfo, int], sm_budgets: tuple[int, int], timing: PairTiming
) -> CorunRow:
    stage_a, size_a, stage_b, size_b = item
    slow_a, slow_b = timing.slowdowns
    return CorunRow(
        stages=(stage_a.name, stage_b.name),
        fingerprints=(stage_a.fingerprint, stage_b.fingerprint),
        batch_sizes=(size_a, size_b),
        sm_budgets=sm_budgets,
        slowdowns=(_four_digits(slow_a), _four_digits(slow_b)),
    )


def _four_digits(value: float) -> float:
    # Rounded when measured, not when saved: a plan must not depend on whether its table was read.
    return float(f"{value:.4g}")
