"""The command `pbjax roofline`: what bounds a model, by its shapes alone, and what would help."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pbjax.cli.options import Dtype, Figures, Html, Json, path_option, to_source
from pbjax.cli.outputs import check_drawable
from pbjax.cli.subject import (
    Peaks,
    Subject,
    check_calls,
    find_figures,
    find_subject,
    keep_measured,
    measured_points,
    measured_reports,
    require_room,
)
from pbjax.errors import InputError
from pbjax.files import check_writable

if TYPE_CHECKING:
    from pbjax.roofline.batch_study import PhaseStudy, SizeChoice, SizePoint
    from pbjax.roofline.result import Roofline
    from pbjax.roofline.what_if import Variant

Phase = Literal["prefill", "decode", "forward"]
Attention = Literal["fused", "unfused"]


def roofline(
    model: Annotated[
        str,
        typer.Argument(
            help="A preset, such as llama3-8b, or a folder with a config.json.", parser=to_source
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(help="Kind of device, such as nvidia-h200 or l40s; this machine's otherwise."),
    ] = None,
    peaks: Annotated[
        Peaks, typer.Option(help="What pbjax calibrate measured, where it has, or the datasheet.")
    ] = "measured",
    phase: Annotated[
        Phase | None, typer.Option(help="One phase; all that the model has otherwise.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of the batch.")] = 1,
    seq: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens, samples or frames of a row; images need none. In decode what is cached.",
        ),
    ] = None,
    dtype: Dtype = "bfloat16",
    layers: Annotated[
        int | None, typer.Option(min=1, help="How many layers; all of the model's otherwise.")
    ] = None,
    attention: Annotated[
        Attention, typer.Option(help="Whether scores stay out of memory.")
    ] = "fused",
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Of the model as its layers call our kernels.")
    ] = False,
    study: Annotated[
        bool, typer.Option("--study", help="Also predict curves over batch and length.")
    ] = False,
    latency_ms: Annotated[
        float | None, typer.Option(min=0, help="The longest a call may take, for --study.")
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Also ask for fewer bits, more devices, a draft.")
    ] = False,
    devices: Annotated[int, typer.Option(min=2, help="Devices in parallel, for --what-if.")] = 2,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft model of speculative decoding, for --what-if.", parser=to_source),
    ] = None,
    acceptance: Annotated[
        float, typer.Option(min=0, max=1, help="Probability that a drafted token is kept.")
    ] = 0.8,
    drafted: Annotated[int, typer.Option(min=1, help="Tokens drafted each round.")] = 4,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Also run it here, with random weights, stage by stage."),
    ] = False,
    measure_batch: Annotated[
        list[int] | None,
        typer.Option(min=1, help="A further batch to measure, for the curves; may be repeated."),
    ] = None,
    measure_seq: Annotated[
        list[int] | None,
        typer.Option(min=1, help="A further length to measure, for the curves; may be repeated."),
    ] = None,
    save_measured: Annotated[
        Path | None, path_option(help="Where to keep what --measure finds.")
    ] = None,
    measured: Annotated[
        Path | None, path_option(help="Compare with what --save-measured has kept.")
    ] = None,
    html: Html = None,
    figures: Figures = None,
    as_json: Json = False,
) -> None:
    """Predict what bounds each part of a model on a device; needs neither weights nor a GPU."""
    _require_owner("--latency-ms", latency_ms, "--study", study)
    _require_owner("--draft", draft, "--what-if", what_if)
    _require_owner("--save-measured", save_measured, "--measure", measure)
    _require_owner("--measure-batch", measure_batch or None, "--measure", measure)
    _require_owner("--measure-seq", measure_seq or None, "--measure", measure)
    check_writable("--save-measured", save_measured)
    check_drawable(figures, html)
    from pbjax.roofline.measured_table import MeasuredTable, checks_rows, checks_text, points_text

    table = None if measured is None else MeasuredTable.load(measured)
    limits = find_figures(device, peaks, here=measure)
    subject = find_subject(model, limits, dtype, attention, layers)
    subject = replace(subject, kernels=kernels or measure or table is not None)
    phases = (phase,) if phase else subject.shape.phases
    sizes = [(batch, seq), *((rows, seq) for rows in measure_batch or ())]
    sizes += [(batch, length) for length in measure_seq or ()]
    check_calls(subject, phases, sizes)
    if study:
        _check_study(subject, phases)
    drafting = None if draft is None else _find_draft(subject, draft, dtype, seq)
    if measure:
        ran = measured_reports(subject, phases, sizes)
    else:
        ran = [subject.report(name, batch, seq) for name in phases]
    reports = ran[: len(phases)]
    if table is not None:
        # A study has points of its own: its report need not be one of them.
        reports = [r if study and not table.find(r) else table.attached(r) for r in reports]
    texts = {report.phase: str(report) for report in reports}
    document: dict[str, object] = {"reports": [report.to_dict() for report in reports]}
    if any(report.measured for report in reports):
        compared = [report for report in reports if report.measured]
        texts |= {f"{r.phase}: predicted and measured": checks_text(r) for r in compared}
        document["checks"] = checks_rows(reports)
    if save_measured is not None:
        keep_measured(ran, save_measured)
    curves = [_curves(subject, report, seq, latency_ms) for report in reports] if study else []
    points: list[tuple[SizePoint, SizePoint]] = []
    if study:
        texts |= _study_texts(reports, curves)
        document["studies"] = [s.to_dict() | {"choice": asdict(c)} for s, c in curves]
        points = measured_points(subject, ran if measure else reports, table)
    if points:
        texts["measured points"] = points_text(points)
        document["measured_points"] = [asdict(found) for _, found in points]
    if what_if:
        answers = [_what_if(subject, report, seq, devices) for report in reports]
        if drafting is not None:
            answers.append(_speculation(subject, drafting, seq, acceptance, drafted))
        texts |= {str(data["name"]): text for text, data in answers}
        document["what_if"] = [data for _, data in answers]
    print(json.dumps(document) if as_json else "\n\n".join(texts.values()))
    if html is not None or figures is not None:
        found = tuple(point for _, point in points)
        _write(reports, curves, found, texts, document, (html, figures))
    for report in reports:
        require_room(subject, report, seq)


def _require_owner(option: str, value: object, owner: str, given: bool) -> None:
    """Raises InputError where an option has no effect."""
    if value is not None and not given:
        raise InputError(
            f"pbjax roofline {option} {value}: it is for {owner}, which is absent; it is allowed "
            f"with {owner}; add {owner}, or leave out {option}"
        )


def _check_study(subject: Subject, phases: Sequence[str]) -> None:
    """Raises InputError where curves are of no use."""
    if "forward" in phases:
        raise InputError(
            f"pbjax roofline {subject.name} --study: it has the phase forward; curves are of "
            "prefill and decode; ask for a model that generates"
        )


def _study_texts(
    reports: "list[Roofline]", curves: "list[tuple[PhaseStudy, SizeChoice]]"
) -> dict[str, str]:
    from pbjax.roofline.tables import study_text

    return {
        f"{report.phase} over batch and length": study_text(*found, report)
        for report, found in zip(reports, curves, strict=True)
    }


def _write(
    reports: "list[Roofline]",
    curves: "list[tuple[PhaseStudy, SizeChoice]]",
    measured: "tuple[SizePoint, ...]",
    texts: dict[str, str],
    document: dict[str, object],
    places: tuple[Path | None, Path | None],
) -> None:
    """Writes what was asked for and names it on stderr, so that stdout stays one document."""
    from pbjax.figures.html import Findings, write_figures, write_page

    findings = Findings(
        reports=tuple(reports),
        curves=tuple(curves),
        measured=measured,
        texts=texts,
        document=document,
    )
    page, folder = places
    written = [] if folder is None else write_figures(findings, folder)
    if page is not None:
        write_page(findings, page)
        written.append(page)
    print(f"written: {', '.join(map(str, written))}", file=sys.stderr)


def _curves(
    subject: Subject, report: "Roofline", seq: int | None, latency_ms: float | None
) -> "tuple[PhaseStudy, SizeChoice]":
    from pbjax.roofline.batch_study import choose_point, study_phase

    if seq is None:
        raise AssertionError("phases that are studied have a length")
    found = study_phase(
        subject.report,
        report.phase,
        batch_size=report.items,
        seq_len=seq,
        max_seq_len=getattr(subject.shape.config, "max_seq_len", None),
        # Without ceilings nothing is known of tiles, and all is a line.
        curves="traced" if subject.kernels and subject.device.launch_s else "interpolated",
    )
    limit = None if latency_ms is None else latency_ms / 1e3
    return found, choose_point(found.by_batch, limit)


def _what_if(
    subject: Subject, report: "Roofline", seq: int | None, devices: int
) -> tuple[str, dict[str, object]]:
    from pbjax.roofline.tables import what_if_text

    variants = _variants(subject, report, seq, devices)
    data: dict[str, object] = {
        "name": f"{report.phase}: what if",
        "phase": report.phase,
        "variants": [
            {"name": v.name, "note": v.note, "report": v.report.to_dict()} for v in variants
        ],
    }
    return what_if_text(report, variants), data


def _variants(
    subject: Subject, report: "Roofline", seq: int | None, devices: int
) -> "list[Variant]":
    from pbjax.roofline import what_if as changes

    config = subject.shape.config
    head_dim = getattr(config, "head_dim", config.embed_dim // config.num_heads)
    other = "unfused" if subject.attention == "fused" else "fused"
    variants = [
        changes.with_weight_bits(report, 8),
        changes.with_weight_bits(report, 4, group=changes.SCALE_GROUP),
    ]
    if changes.FP8 in report.device.tensor_flops_per_s:
        variants.append(changes.with_fp8(report))
    if report.memory.kv_cache_bytes:
        variants.append(changes.with_kv_bits(report, 8, head_dim))
    turned = replace(subject, attention=other).report(report.phase, report.items, seq)
    variants.append(
        changes.Variant(name=f"attention {other}", report=turned, note="scores of 4 bytes")
    )
    if report.device.link_bytes_per_s is not None:
        layers = subject.num_layers or config.num_layers
        variants.append(changes.with_tensor_parallel(report, devices, config.embed_dim, layers))
    return variants


def _find_draft(subject: Subject, draft: str, dtype: str, seq: int | None) -> Subject:
    """The draft model of speculative decoding, which must decode as the model itself does.

    Raises:
      InputError: It or the model does not decode, or not so many tokens.
    """
    found = find_subject(draft, subject.device, dtype, subject.attention, None)
    for each in (subject, found):
        if "decode" not in each.shape.phases:
            raise InputError(
                f"pbjax roofline {subject.name} --draft {draft}: {each.name} does not decode; two "
                "models that generate are allowed; choose others, or leave out --draft"
            )
    check_calls(found, ("decode",), [(1, seq)])
    return replace(found, kernels=subject.kernels)


def _speculation(
    subject: Subject, drafting: Subject, seq: int | None, acceptance: float, drafted: int
) -> tuple[str, dict[str, object]]:
    from pbjax.roofline.batch_study import BATCH_NODES, interpolated
    from pbjax.roofline.tables import speculation_text
    from pbjax.roofline.what_if import break_even_batch, speculate

    def seconds(of: Subject, new_tokens: int):
        known = {rows: of.report("decode", rows, seq, new_tokens) for rows in BATCH_NODES}
        return lambda rows: interpolated(known, rows).total.seconds

    steps = seconds(subject, 1), seconds(subject, drafted + 1), seconds(drafting, 1)
    options = {"acceptance": acceptance, "num_drafted": drafted}
    batches = [2**i for i in range(11)]
    found = speculate(*steps, batches=batches, **options)
    even = break_even_batch(
        lambda rows: speculate(*steps, batches=(rows,), **options)[0].speedup, batches[-1]
    )
    text = speculation_text(found, even, drafted=drafted, acceptance=acceptance)
    data = {
        "draft": drafting.name,
        **options,
        "break_even_batch": even,
        "batches": list(map(asdict, found)),
    }
    return text, {"name": "speculative decoding", "phase": "decode", "speculation": data}
