"""Batching study and what-if as tables of at most 100 columns; computes nothing new."""

import math
from collections.abc import Sequence

from pbjax.roofline.batch_study import PLATEAU, PhaseStudy, SizeChoice, SizePoint
from pbjax.roofline.result import Roofline
from pbjax.roofline.what_if import Speculation, Variant
from pbjax.text_tables import size, table_text, wrapped

_CURVE = (
    *("ms", "tokens/s", "dense FLOP/B", "TFLOP/s", "attention FLOP/B", "TFLOP/s", "memory"),
    "",
)
# tests/closed_forms.py derives them.
_DENSE = "FLOP/B in closed form: a dense layer of k x n 2 r k n / (e (r k + k n + r n)), "
_LETTERS = "; b rows, s tokens, width h, e bytes a number, G query heads for a key-value head"
_CLOSED_FORMS = {
    "prefill": f"{_DENSE}the output projection 2 r h / (e (2 r + h)), r = b s; fused attention "
    f"2 s / (e (1 + 1/G)), whatever b{_LETTERS}",
    "decode": f"{_DENSE}the output projection 2 r h / (e (2 r + h)), r = b; fused attention "
    f"2 s G / (e (s + G)), whatever b{_LETTERS}",
}


def study_text(study: PhaseStudy, choice: SizeChoice, report: Roofline) -> str:
    """A phase over batch and over length, with conclusions from the curves.

    Args:
      study: The curves.
      choice: The batch that was chosen from them.
      report: Any report of the same model and device, for its name and ridge point.
    """
    seq_len, batch_size = study.by_batch[0].seq_len, study.by_seq[0].batch_size
    by_batch = table_text(
        f"{report.model}, {study.phase} over the batch, {seq_len:,} tokens a row, on "
        f"{report.device.kind} (predicted)",
        ("batch", *_CURVE),
        [(f"{p.batch_size:,}", *_cells(p), _mark(p, choice)) for p in study.by_batch],
    )
    by_seq = table_text(
        f"{study.phase} over the length, batch {batch_size:,}",
        ("tokens", *_CURVE),
        [(f"{p.seq_len:,}", *_cells(p), "" if p.fits else "does not fit") for p in study.by_seq],
    )
    return f"{by_batch}\n{_conclusions(study, choice, report)}\n\n{by_seq}"


def _cells(point: SizePoint) -> tuple[object, ...]:
    return (
        point.seconds * 1e3,
        point.tokens_per_s,
        point.dense_intensity,
        point.dense_flops_per_s / 1e12,
        point.attention_intensity,
        point.attention_flops_per_s / 1e12,
        size(point.peak_bytes),
    )


def _mark(point: SizePoint, choice: SizeChoice) -> str:
    if point == choice.chosen:
        return "<- chosen"
    return "" if point in choice.front else "beaten" if point.fits else "does not fit"


def _conclusions(study: PhaseStudy, choice: SizeChoice, report: Roofline) -> str:
    other = choice.runner_up
    critical = (
        f"dense layers reach the ridge point, {report.ridge_point:.0f} FLOP/byte, at "
        f"{_rows(study.critical_batch)}"
    )
    layers: dict[str, list[str]] = {}
    for name, rows in study.layers.items():
        layers.setdefault(_rows(rows), []).append(name.rsplit("/", 1)[-1])
    lines = [
        f"critical batch: {critical}; "
        + "; ".join(f"{', '.join(names)} at {rows}" for rows, names in layers.items()),
        f"largest batch that fits: {study.largest_batch:,} ({size(study.kv_bytes_per_row)} of KV "
        "cache a row)",
        f"chosen: batch {choice.chosen.batch_size:,}: {choice.reason}"
        + (f"; runner-up {other.batch_size:,}" if other else ""),
        f"throughput over the batch {turn_text(study.by_batch, 'batch_size', 'rows')}; over the "
        f"length it {turn_text(study.by_seq, 'seq_len', 'tokens')}",
        "the Pareto front of latency and throughput is every batch that is not marked as beaten",
        _CLOSED_FORMS[study.phase],
    ]
    return "\n".join(line for text in lines for line in wrapped(text))


def turn_text(points: Sequence[SizePoint], size: str, unit: str) -> str:
    """Where a curve's plateau begins, and where it ends for good."""
    best = max(point.tokens_per_s for point in points)
    good = [i for i, p in enumerate(points) if p.tokens_per_s >= (1 - PLATEAU) * best]
    text = f"is within {PLATEAU:.0%} of its best from {getattr(points[good[0]], size):,} {unit}"
    if good[-1] + 1 < len(points):
        return f"{text}, and falls again from {getattr(points[good[-1] + 1], size):,}"
    return f"{text}, and does not fall again"


def _rows(rows: float) -> str:
    return f"batch {max(1, math.ceil(rows)):,}" if math.isfinite(rows) else "no batch"


def what_if_text(report: Roofline, variants: Sequence[Variant]) -> str:
    """A report and its variants as a table.

    Args:
      report: The unchanged report.
      variants: The changed reports.
    """
    rows = [
        (
            name,
            found.total.seconds * 1e3,
            f"{report.total.seconds / found.total.seconds:.2f}x",
            str(found.total.resource),
            size(found.total.traffic.total),
            size(found.memory.peak_bytes),
            "yes" if found.fits else "no",
        )
        for name, found in [("as it is", report), *((v.name, v.report) for v in variants)]
    ]
    title = f"{report.model}, {report.phase}: what if (predicted, {report.device.kind})"
    columns = ("", "ms", "speed-up", "class", "moved", "memory", "fits")
    notes = [line for v in variants for line in wrapped(f"{v.name}: {v.note}")]
    return "\n".join([table_text(title, columns, rows), *notes])


def speculation_text(
    found: Sequence[Speculation], break_even: int | None, *, drafted: int, acceptance: float
) -> str:
    """Speculative decoding over the batch.

    Args:
      found: The predictions by batch.
      break_even: The largest batch up to which it gains; None if it always does.
      drafted: Tokens drafted each round.
      acceptance: Probability that a drafted token is kept.
    """
    rows = [(f"{s.batch_size:,}", s.draft_cost, s.verify_cost, f"{s.speedup:.2f}x") for s in found]
    title = (
        f"speculative decoding, {drafted} drafted tokens, {acceptance:.0%} accepted: a draft step "
        "and the check of all\ndrafted tokens over a plain step, and the expected speed-up"
    )
    if break_even is None:
        last = f"break-even: gains at every batch up to {found[-1].batch_size:,}"
    elif break_even:
        last = f"break-even: gains up to batch {break_even:,}"
    else:
        last = "break-even: gains at no batch"
    columns = ("batch", "draft step", "check", "speed-up")
    return f"{table_text(title, columns, rows)}\n{last}"
