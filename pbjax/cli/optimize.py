"""The command `pbjax optimize`: plans, measures and reports, and embeds what it was given."""

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pbjax.cli.exits import interrupted_with
from pbjax.cli.model_folder import ENCODERS, MB, encodes_text, find_folder
from pbjax.cli.options import (
    Figures,
    Html,
    Json,
    StoredDtype,
    path_argument,
    path_option,
    this_device,
)
from pbjax.cli.outputs import check_outputs, write_outputs
from pbjax.errors import InputError
from pbjax.files import check_writable
from pbjax.planning.plan import Plan
from pbjax.planning.profiling import Profile
from pbjax.planning.timetable import Split

if TYPE_CHECKING:
    from pbjax.graph.functional import Model
    from pbjax.tuning.batch_size import BatchChoice

AUTO = "auto"


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
    dtype: StoredDtype = None,
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
    figures: Figures = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Optimise a text encoder for a batch of sentences, and embed them."""
    from pbjax.progress import ProgressPrinter

    kept = "what --profile has measured is kept" if profile else ""
    with interrupted_with(kept), ProgressPrinter() as progress:
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


def read_batch(text: str, latency_ms: float | None) -> int | None:
    """The number of rows that `--batch` names, or None for "auto".

    Raises:
      InputError: It is neither, the limit is no time, or there is one for a batch that is given.
    """
    if latency_ms is not None and not latency_ms > 0:  # Before the model is loaded.
        raise InputError(
            f"--latency-ms {latency_ms:g}: not a time; milliseconds above 0 are allowed; give the "
            "longest that a batch may take, or leave it out"
        )
    if text == AUTO:
        return None
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise InputError(
            f"--batch {text}: not a number of rows; 1 or more, or auto, is allowed; write for "
            "instance --batch 96"
        )
    if latency_ms is not None:
        raise InputError(
            f"--latency-ms {latency_ms:g} --batch {text}: the batch is given already; a limit goes "
            "with --batch auto; leave out one of them"
        )
    return int(text)


def choose_rows(
    model: "Model",
    inputs: tuple[object, ...],
    latency_ms: float | None,
    max_batch: int,
    progress: Callable[[str, int, int, str], None],
) -> "BatchChoice":
    """Chooses the batch of a model on this machine by prediction and a few measurements.

    Args:
      model: The model.
      inputs: Of a call, at any batch.
      latency_ms: The longest that a call may take; None = any.
      max_batch: How many rows there are.
      progress: Called as progress(phase, done, total, item).
    """
    from pbjax.planning.ceilings import calibrated
    from pbjax.tuning.batch_size import choose_batch

    return choose_batch(
        model,
        *inputs,
        device=calibrated(this_device("pbjax optimize --batch auto")),
        latency_s=None if latency_ms is None else latency_ms / 1e3,
        max_batch=max_batch,
        measure=True,
        progress=lambda done, total, item: progress("choose batch", done, total, item),
    )
