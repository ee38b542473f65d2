"""The command `pbjax optimize`: plans, compiles, checks and measures a model, and reports.

What arguments decide is refused first, then what files and configurations decide; only then are
weights read, and the work begins.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pbjax.arguments import dtype_name
from pbjax.cli.batch_options import AUTO, read_batch, read_plan, read_sizes
from pbjax.cli.exits import interrupted_with
from pbjax.cli.options import (
    Figures,
    Html,
    Json,
    input_option,
    path_option,
    this_device,
    to_source,
)
from pbjax.cli.outputs import Outputs, exhaustive_line
from pbjax.errors import InputError
from pbjax.files import check_writable
from pbjax.planning.plan import Plan
from pbjax.planning.profiling import Profile

if TYPE_CHECKING:
    from pbjax.cli.example_inputs import Asked, Examples
    from pbjax.cli.source import Source
    from pbjax.graph.functional import Model
    from pbjax.tuning.batch_size import BatchChoice
    from pbjax.tuning.estimate import Estimate

type _Progress = Callable[[str, int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What is to be done with a model, checked as far as the arguments decide it.

    Attributes:
      rows: Rows of the batch; None where the inputs or --batch auto decide.
      auto: Whether the batch is chosen.
      latency_ms: The longest that a batch may take, where it is chosen.
      sizes: Sizes of sub-batches that are given.
      plan: A plan that is given.
      profile: The measured table.
      fuse: What to replace by kernels.
      exhaustive: Whether every split is predicted.
      outputs: What is written.
    """

    rows: int | None
    auto: bool
    latency_ms: float | None
    sizes: tuple[int, ...] | None
    plan: Plan | None
    profile: Path | None
    fuse: str
    exhaustive: bool
    outputs: Outputs


def optimize(
    model: Annotated[
        str,
        typer.Argument(
            help="A folder of Hugging Face or of pbjax convert; a preset such as bert-base, with"
            " random weights; or module:function, which returns a model or (model, inputs).",
            parser=to_source,
        ),
    ],
    texts: Annotated[
        Path | None, input_option(help="Inputs of a text model: texts, one a line; - is stdin.")
    ] = None,
    ids: Annotated[
        Path | None,
        input_option(
            help="Inputs of a text model: rows of token ids, as JSON lists or .npy; - is stdin."
        ),
    ] = None,
    images: Annotated[
        list[Path] | None,
        path_option(help="Inputs of a ViT: an image, or a folder of images; may be repeated."),
    ] = None,
    audio: Annotated[
        list[Path] | None,
        path_option(help="Inputs of a speech model: a WAV file, or a folder; may be repeated."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="An input of random values, such as 96x128xint32, the batch first; may be"
            " repeated. Without any of these, inputs are random and of the model's kind."
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            help="Rows of the batch, or auto: the smallest that is as fast as any; all rows of the"
            " inputs if absent."
        ),
    ] = None,
    latency_ms: Annotated[
        float | None, typer.Option(help="The longest that a batch may take, for --batch auto.")
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a text, cut and padded to it (64 if absent); tokens, samples or frames"
            " of a row of random inputs.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Dtype of weights and activations, bf16, fp16 or fp32; if absent the stored one,"
            " or bfloat16 for a preset.",
            parser=dtype_name,
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Sizes to run instead of searching, such as 48,32,16.")
    ] = None,
    profile: Annotated[
        Path | None, path_option(help="Measured table to read and complete.")
    ] = None,
    plan: Annotated[Path | None, path_option(help="Plan to run instead of searching.")] = None,
    save_plan: Annotated[Path | None, path_option(help="Where to write the plan.")] = None,
    fuse: Annotated[
        str,
        typer.Option(help="What to replace by kernels: auto, all, none or names; all,-gemm.2."),
    ] = "auto",
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Also predict every split, to check the search.")
    ] = False,
    trace: Annotated[
        Path | None, path_option(help="Also write the timetable as a trace that Perfetto opens.")
    ] = None,
    figures: Figures = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Plan, compile, check and measure a model for a batch; say what was decided, and why."""
    from pbjax.cli.example_inputs import asked_inputs

    asked = asked_inputs(
        texts=texts, images=images or (), audio=audio or (), ids=ids, shapes=shape or (), seq=seq
    )
    rows = read_batch(batch, latency_ms)
    sizes = read_sizes(split, batch, rows)
    given = read_plan(plan, split=split, batch=batch, rows=rows)
    wanted = _Wanted(
        rows=rows or (given.batch_size if given else None if sizes is None else sum(sizes)),
        auto=batch == AUTO,
        latency_ms=latency_ms,
        sizes=sizes,
        plan=given,
        profile=profile,
        fuse=fuse,
        exhaustive=exhaustive,
        outputs=Outputs(plan=save_plan, trace=trace, figures=figures, html=html),
    )
    _check(wanted)
    this_device("pbjax optimize")
    kept = "what --profile has measured is kept" if profile else ""
    with interrupted_with(kept):
        _optimize(model, dtype, asked, wanted, as_json=as_json)


def _check(wanted: _Wanted) -> None:
    """Refuses what cannot be done or written, before anything is loaded."""
    wanted.outputs.check(has_table=wanted.plan is None and wanted.rows != 1)
    if wanted.exhaustive and wanted.plan is not None:
        raise InputError(
            "--exhaustive --plan: a loaded plan comes without the measured table that splits are "
            "predicted from; a search is allowed; leave out one of them"
        )
    profile = wanted.profile
    if profile is not None and profile.exists():
        Profile.load(profile)
    else:
        check_writable("--profile", profile)
    from pbjax.fusion import selection_of

    selection_of(wanted.fuse)


def _optimize(
    name: str, dtype: str | None, asked: "Asked", wanted: _Wanted, *, as_json: bool
) -> None:
    """Loads the model, does what is wanted, and prints it."""
    from pbjax.cli.example_inputs import check_kind, find_examples
    from pbjax.cli.source import find_source, load_source
    from pbjax.pipeline import optimize as run
    from pbjax.progress import ProgressPrinter

    say = (lambda text: None) if as_json else print
    source = find_source(name, dtype)
    check_kind(asked, source)
    examples = find_examples(asked, source, wanted.rows)
    _check_call(source, examples, wanted)
    with ProgressPrinter() as progress:
        start = time.perf_counter()
        loaded = load_source(source, dtype, say, progress)
        load_s = time.perf_counter() - start
        say(f"model loaded in {load_s:.1f} s")
        examples = examples or _own_examples(source, loaded.inputs)
        choice = _choice(loaded.model, examples, wanted, progress)
        if choice is not None:
            say(f"\n{choice}")
        inputs = examples.take(choice.batch_size if choice else _rows(examples, wanted))
        expected = _estimate(loaded.model, inputs, wanted)
        if expected is not None:
            print(expected, file=sys.stderr)
        start = time.perf_counter()
        fast = run(
            loaded.model,
            *inputs,
            split=wanted.sizes,
            profile=wanted.profile,
            plan=wanted.plan,
            fuse=wanted.fuse,
            progress=progress,
        )
        taken_s = time.perf_counter() - start
        if expected is not None:
            print(f"it took {taken_s:.0f} s; {expected.seconds:.0f} s expected", file=sys.stderr)
        report = fast.report()
        say(f"\n{report}")
        if wanted.exhaustive:
            say(exhaustive_line(report, progress))
        written = wanted.outputs.write(fast, inputs)
    if written:
        print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
    if as_json:
        chosen = {} if choice is None else {"batch_choice": choice.to_dict()}
        print(json.dumps({**report.to_dict(), **chosen, "load_weights_s": load_s}))


def _rows(examples: "Examples", wanted: _Wanted) -> int:
    """The rows of the batch, where it is not chosen by measuring.

    Raises:
      InputError: There are fewer, or random inputs leave it open.
    """
    rows = wanted.rows or examples.rows
    if rows is None:
        raise InputError(
            "--batch: it is absent, and random inputs have any number of rows; 1 or more, or auto, "
            "is allowed; write for instance --batch 96"
        )
    if examples.rows is not None and rows > examples.rows:
        raise InputError(
            f"--batch {rows}: the inputs have {examples.rows} rows; 1 to {examples.rows} are "
            "allowed; lower it, or give more"
        )
    return rows


def _check_call(source: "Source", examples: "Examples | None", wanted: _Wanted) -> None:
    """Has a model without weights refuse inputs that it cannot take."""
    from pbjax.cli.model_folder import trace

    if examples is None or source.shape is None:
        return
    inputs = examples.shapes(1 if wanted.auto else _rows(examples, wanted))
    try:
        trace(source.shape.module, *inputs)
    except TypeError as error:
        raise InputError(
            f"optimize({source.name}): it does not take these {len(inputs)} inputs "
            f"({str(error).splitlines()[0]}); its own inputs in their order are allowed; give them "
            "by --shape, or leave it out for random ones"
        ) from error


def _own_examples(source: "Source", inputs: tuple[object, ...] | None) -> "Examples":
    """The inputs that a factory gave with its model."""
    from pbjax.cli.example_inputs import fixed

    if inputs is None:
        raise InputError(
            f"optimize({source.name}): no inputs; --ids and --shape are allowed, and a function "
            "that returns (model, inputs); give one, such as --shape 96x128xint32"
        )
    return fixed(inputs)


def _choice(
    model: "Model", examples: "Examples", wanted: _Wanted, progress: _Progress
) -> "BatchChoice | None":
    """The batch of `--batch auto`, by prediction and a few measurements on this machine."""
    if not wanted.auto:
        return None
    from pbjax.planning.ceilings import calibrated
    from pbjax.tuning.batch_size import choose_batch

    return choose_batch(
        model,
        *examples.take(examples.rows or 1),
        device=calibrated(this_device("pbjax optimize --batch auto")),
        latency_s=None if wanted.latency_ms is None else wanted.latency_ms / 1e3,
        max_batch=examples.rows,
        measure=True,
        progress=lambda done, total, item: progress("choose batch", done, total, item),
    )


def _estimate(model: "Model", inputs: tuple[object, ...], wanted: _Wanted) -> "Estimate | None":
    """How long the work will take; None where fusion is to be given up, which the work finds."""
    from pbjax.errors import FusionError
    from pbjax.program.analysis import analyse
    from pbjax.tuning.estimate import estimate, num_cores, probe_s, work_of

    device = this_device("pbjax optimize")
    try:
        analysis = analyse(model, inputs, device=device, fuse=wanted.fuse)
    except FusionError:
        return None
    one_row = "it has one row" if analysis.batch.batch_size == 1 else ""
    wanted.outputs.check_split(one_row or analysis.unsplittable)
    work = work_of(analysis, wanted.profile, planned=wanted.plan is not None)
    return estimate(work, probe_s(), num_cores())
