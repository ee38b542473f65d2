"""The command line: `pbjax convert`, `pbjax optimize`, and the commands of other modules.

Results go to stdout, progress and warnings to stderr. Imports stand inside the commands, so that
--help answers at once. Exit codes: 0 done; 1 a model, plan or device that cannot be used; 2 a wrong
argument or file; 3 an unsupported configuration; 4 tensors that do not fit; 5 a numeric check;
130 interrupted.
"""

import json
import sys
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from pbjax.cli.batch import choose_rows, read_batch
from pbjax.cli.calibrate import calibrate
from pbjax.cli.devices import this_device
from pbjax.cli.inference import ENCODERS, classify, embed, encodes_text, generate, transcribe
from pbjax.cli.outputs import check_outputs, write_outputs
from pbjax.cli.paths import path_argument, path_option
from pbjax.cli.roofline import roofline
from pbjax.cli.search import profile as profile_command
from pbjax.cli.search import search as search_command
from pbjax.cli.subject import find_folder
from pbjax.errors import FileError, InputError, PbjaxError, VerificationError
from pbjax.files import check_writable
from pbjax.planning.plan import Plan
from pbjax.planning.profiling import Profile
from pbjax.planning.timetable import Split

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

MB = 1_000_000

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def _print_version(wanted: bool) -> bool:
    if wanted:
        from importlib.metadata import version

        print(f"pbjax {version('pbjax')}")
        raise typer.Exit
    return wanted


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
) -> None:
    """Fast Transformer inference on one GPU: kernels, rooflines, staggered sub-batches."""


@app.command()
def convert(
    source: Annotated[Path, path_argument(help="A Hugging Face model folder.")],
    target: Annotated[Path, path_argument(help="The Orbax checkpoint to write; must not exist.")],
    dtype: Annotated[str | None, typer.Option(help="Store weights as this dtype.")] = None,
    reference: Annotated[
        Path | None, path_option(help="Inputs and outputs to check against (.npz).")
    ] = None,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            help="Read pytorch_model.bin where there are no safetensors: its tensors alone, without"
            " running the program that such a file is.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert a Hugging Face folder into a checkpoint that loads without transposing."""
    from pbjax.progress import ProgressPrinter

    with _exit_codes():
        models = import_module("models")
        with ProgressPrinter() as progress:
            report = models.convert(
                source,
                target,
                dtype,
                allow_pickle=allow_pickle,
                reference=reference,
                report=(lambda line: None) if as_json else print,
                progress=lambda done, total: progress("convert", done // MB, total // MB, "MB"),
            )
        if as_json:
            print(json.dumps(report.as_dict(), default=str))


@app.command()
def optimize(
    model: Annotated[Path, path_argument(help="A Hugging Face folder, or one of pbjax convert.")],
    texts: Annotated[Path, path_option(help="Sentences to embed, one a line.")],
    batch: Annotated[
        str, typer.Option(help="Sentences in a batch, or auto: the smallest that is as fast.")
    ] = "96",
    latency_ms: Annotated[
        float | None, typer.Option(help="The longest that a batch may take, for --batch auto.")
    ] = None,
    seq: Annotated[int, typer.Option(min=1, help="Tokens per sentence, padded.")] = 64,
    dtype: Annotated[str | None, typer.Option(help="Of weights and activations.")] = None,
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
        bool, typer.Option(help="Also predict every split, to check the search.")
    ] = False,
    trace: Annotated[
        Path | None, path_option(help="Also write the timetable as a trace that Perfetto opens.")
    ] = None,
    figures: Annotated[
        Path | None,
        path_option(help="Also write figures (SVG, PNG), CSV and JSON into this folder."),
    ] = None,
    html: Annotated[
        Path | None, path_option(help="Also write a page with figures that needs no network.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Optimise a text encoder for a batch of sentences, and embed them."""
    from pbjax.progress import ProgressPrinter

    interrupted = "what --profile has measured is kept" if profile else ""
    with _exit_codes(interrupted), ProgressPrinter() as progress:
        rows = read_batch(batch, latency_ms)
        sizes = _sizes(split, rows)
        check_outputs(plan, trace=trace, figures=figures, html=html)
        check_writable("--save-plan", save_plan)
        decided = None if plan is None else Plan.load(plan)
        if profile is not None and profile.exists():
            Profile.load(profile)  # A corrupt one is refused before the model is loaded.
        elif profile is not None:
            check_writable("--profile", profile)
        say = (lambda text: None) if as_json else print
        models = import_module("models")
        from pbjax.inference import texts as text
        from pbjax.pipeline import optimize as run
        from pbjax.planning.search import search
        from pbjax.tuning.optimized import Optimized

        this_device("pbjax optimize")  # What cannot be planned for is refused before it loads.
        sentences = text.read_sentences(texts, rows)
        shape = find_folder(model, "optimize", encodes_text, ENCODERS)
        _check_length(seq, shape.config.max_seq_len)
        tokenizer = models.load_tokenizer(model)
        start = time.perf_counter()
        encoder = models.load(
            model,
            dtype,
            verify=True,
            report=say,
            progress=lambda done, total: progress("load", done // MB, total // MB, "MB"),
        )
        load_s = time.perf_counter() - start
        say(f"weights loaded and checked in {load_s:.1f} s")
        encoded = text.encode(tokenizer, sentences, seq)
        inputs = (encoded.input_ids, encoded.attention_mask)
        choice = None
        if rows is None:
            choice = choose_rows(encoder, inputs, latency_ms, len(sentences), progress)
            say(f"\n{choice}")
            rows = choice.batch_size
            sentences, inputs = sentences[:rows], tuple(x[:rows] for x in inputs)
        options = {"split": sizes, "profile": profile, "plan": decided, "fuse": fuse}
        fast = run(encoder, *inputs, **options, progress=progress)
        if not isinstance(fast, Optimized):
            raise AssertionError("only a call with state= gives a step")
        report = fast.report()
        say(f"\n{report}")
        if exhaustive and report.profile is not None:
            progress("exhaustive search", 0, 1, "")
            found = search(report.summary, report.profile, rows, policy="exhaustive")
            say(_exhaustive_line(report.search, found))
        if save_plan is not None:
            fast.plan.save(save_plan)
        written = write_outputs(fast, inputs, trace=trace, figures=figures, html=html)
        if written:
            print(f"written: {', '.join(map(str, written))}", file=sys.stderr)
        hidden = _numpy(fast(*inputs))
        embeddings = text.sentence_embeddings(hidden, inputs[1])
        pairs = text.most_similar(sentences, embeddings, 3)
        say(f"\nthe three most similar of {rows} sentences:")
        for pair in pairs:
            say(f"  {pair.cosine:.3f}  {pair.first}\n         {pair.second}")
        if as_json:
            found = [{"cosine": p.cosine, "first": p.first, "second": p.second} for p in pairs]
            chosen = {} if choice is None else {"batch_choice": choice.to_dict()}
            document = {**report.to_dict(), **chosen, "load_weights_s": load_s, "similar": found}
            print(json.dumps(document))
        elif save_plan is not None:
            print(f"plan written to {save_plan}")


def _check_length(seq: int, longest: int) -> None:
    if seq > longest:
        raise InputError(
            f"--seq {seq}: the model has {longest} positions; 1 to {longest} are allowed; lower it"
        )


def _sizes(split: str | None, rows: int | None) -> tuple[int, ...] | None:
    """The sizes of sub-batches that add up to the rows, where these are known already."""
    if split is None:
        return None
    try:
        sizes = tuple(int(size) for size in split.split(","))
    except ValueError as error:
        raise InputError(
            f"--split {split}: not numbers; one to three sizes joined by commas are allowed; "
            "write for instance --split 48,32,16"
        ) from error
    if rows is not None and Split(sizes=sizes).batch_size != rows:
        raise InputError(
            f"--split {split}: adds up to {sum(sizes)}; the batch has {rows} rows; give sizes that "
            "add up to them, or leave out --split to search"
        )
    return sizes


def _exhaustive_line(searched, exhaustive) -> str:
    from pbjax.runtime.measured_programs import joined, milliseconds

    best = exhaustive.best
    sizes = joined(best.split.sizes)
    line = (
        f"exhaustive optimum: {sizes}, {milliseconds(best.prediction.makespan_s)} ms, "
        f"{exhaustive.evaluations:,} evaluations in {exhaustive.seconds:.1f} s"
    )
    if searched is None:
        return line
    excess = searched.best.prediction.makespan_s / best.prediction.makespan_s - 1
    return f"{line}; the search is {excess:.2%} above it"


def _numpy(output):
    """The hidden states of a text encoder's output, on the host."""
    import numpy as np

    return np.asarray(output.last_hidden_state)


@contextmanager
def _exit_codes(interrupted: str = "") -> Generator[None]:
    """Turns warnings, and errors that are raised on purpose, into a line on stderr and a code.

    Args:
      interrupted: What becomes of the work if the user ends it.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            yield
    except KeyboardInterrupt:
        print(f"interrupted{interrupted and '; '}{interrupted}", file=sys.stderr)
        raise typer.Exit(130) from None
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(code) from error


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _exit_code(error: Exception) -> int | None:
    if isinstance(error, VerificationError):
        return 5
    if isinstance(error, InputError | FileError):
        return 2
    return 1 if isinstance(error, PbjaxError) else getattr(error, "exit_code", None)


for command in (
    profile_command,
    search_command,
    generate,
    embed,
    classify,
    transcribe,
    roofline,
    calibrate,
):
    app.command()(_exit_codes()(command))
