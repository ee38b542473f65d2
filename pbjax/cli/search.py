"""The command `pbjax search`: a plan for a device that need not be there, from a measured table.

The model is a preset's name or a folder with a config.json, without weights, up to its last hidden
states.
"""

import json
import sys
from collections.abc import Collection
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pbjax.cli.options import Batch, Dtype, Json, Model, Seq, named_device, path_option
from pbjax.errors import DeviceError, InputError, warn
from pbjax.files import check_writable

if TYPE_CHECKING:
    from pbjax.device import Device
    from pbjax.planning.profiling import Profile
    from pbjax.planning.program_summary import ProgramSummary
    from pbjax.program.analysis import Analysis
    from pbjax.tuning.preset_model import ForwardPass


def search(
    model: Model,
    device: Annotated[str, typer.Option(help="Kind of device, such as nvidia-h200.")],
    batch: Batch,
    seq: Seq = None,
    dtype: Dtype = "bfloat16",
    table: Annotated[
        Path | None, path_option("--profile", help="Measured table; the shipped one if absent.")
    ] = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Also predict every split, to check the search.")
    ] = False,
    save_plan: Annotated[Path | None, path_option(help="Where to write the plan.")] = None,
    as_json: Json = False,
) -> None:
    """Search how to run a batch on a device, from its measured table; no device is needed."""
    from pbjax.planning.search import SearchOptions
    from pbjax.planning.search import search as run
    from pbjax.tuning.offline_plan import document_of, plan_of, plan_text
    from pbjax.tuning.preset_model import ForwardPass

    target = named_device("pbjax search", device)  # before what takes longer
    check_writable("--save-plan", save_plan)
    asked = ForwardPass(model=model, batch_size=batch, seq_len=seq, dtype=dtype)
    path = table or _shipped(target, asked)
    measured = _table(path, target)
    analysis = asked.in_shapes(target)
    summary = _measured_summary(asked, analysis, measured, path)
    measured = measured.only(summary)
    options = SearchOptions(memory_limit_bytes=target.memory_bytes)
    found = run(summary, measured, batch, options)
    plan = plan_of(analysis, summary, measured, found)
    best = run(summary, measured, batch, options, "exhaustive") if exhaustive else None
    if save_plan is not None:
        plan.save(save_plan)
        print(f"written: {save_plan}", file=sys.stderr)
    if as_json:
        print(json.dumps(document_of(plan, found, best)))
    else:
        print(plan_text(plan, measured, found, best, title=asked.name))


def _shipped(device: "Device", asked: "ForwardPass") -> Path:
    from pbjax.planning.profiling import find_profile, find_profiles

    name = asked.name
    path = find_profile(device.slug, name)
    if path is None:
        import_module("models.presets").find_shape(asked.model, asked.dtype)  # if it is a model
        there = ", ".join(each.stem for each in find_profiles(device.slug))
        there = f"there are tables of {there}" if there else "none ships for it at all"
        raise InputError(
            f"pbjax search --device {device.slug} --model {name}: no table of this model ships "
            f"for this device; {there}; measure one on that device with "
            "`pbjax profile`, and give it by --profile"
        )
    return path


def _table(path: Path, device: "Device") -> "Profile":
    import jax

    from pbjax.planning.profiling import Profile, usable_rows

    table = Profile.load(path)
    kind = table.provenance.device_kind
    if kind != device.kind:
        raise DeviceError(
            f"pbjax search --device {device.slug}: the table {path} is of {kind!r}; seconds of one "
            "device say nothing of another; name its device, or give a table of this one by "
            "--profile"
        )
    warning = usable_rows(table, kind, jax.__version__).warning
    if warning:
        warn(warning)
    return table


def _measured_summary(
    asked: "ForwardPass", analysis: "Analysis", table: "Profile", path: Path
) -> "ProgramSummary":
    """The stages as the table knows them: cut for this batch, or else for the one it was made at.

    Raises:
      InputError: It does not know every stage, or not at this batch.
    """
    batch, known = asked.batch_size, {row.fingerprint for row in table.rows}
    largest = max((row.batch_size for row in table.rows), default=0)
    command = asked.command(analysis.device)
    summary, missing = analysis.summary, _unknown(analysis.summary, known)
    if missing and batch < largest:
        summary = replace(asked, batch_size=largest).in_shapes(analysis.device).summary
    if _unknown(summary, known):
        length = "" if asked.length is None else f" at a length of {asked.length}"
        raise InputError(
            f"pbjax search --model {asked.model}: in {asked.dtype}{length} its stages "
            f"{', '.join(missing)} are not in the table {path}, which is of "
            f"{_kinds(table)}; every stage must have been measured; ask for what is there by "
            f"--dtype and --seq, or measure on the device: {command}"
        )
    if summary is not analysis.summary:
        print(
            f"{asked.name}: cut into stages as at a batch of {largest}, where the table was made; "
            f"at {batch} it would be cut otherwise",
            file=sys.stderr,
        )
    reached = min(table.curve(stage).sizes[-1] for stage in summary.stages)
    if batch > reached:
        raise InputError(
            f"pbjax search --batch {batch}: the table {path} reaches {reached} rows; batches up to "
            f"that are allowed; measure more on the device: {command}"
        )
    return summary


def _unknown(summary: "ProgramSummary", known: Collection[str]) -> list[str]:
    return [stage.name for stage in summary.stages if stage.fingerprint not in known]


def _kinds(table: "Profile") -> str:
    """What its rows were measured on, such as "bfloat16 rows of 384 x 768"."""
    kinds = {(row.dtype, row.shape) for row in table.rows}
    found = [f"{dtype} rows of {' x '.join(map(str, shape))}" for dtype, shape in sorted(kinds)]
    return " and ".join(found) or "no stage"
