"""Speed of the six models: beside PyTorch and other programs, by kind of kernel, by norm."""

from collections.abc import Iterable, Mapping
from typing import Any

from result_pages.markdown import (
    Tables,
    conditions,
    given,
    ms,
    page,
    percent,
    ratio,
    section,
    table,
    us,
)

Row = Mapping[str, Any]
NAMES = {
    "vit": "ViT-Base, 256 images",
    "bert": "BERT-Base, 96 x 384",
    "conformer": "Conformer-L, 32 x 512 frames",
    "gpt2": "GPT2-XL, 16 x 512",
    "bloom": "BLOOM-7B1, 8 x 512",
    "llama": "LLaMA3-8B, 8 x 512",
}
PEERS = {"eager": "PyTorch eager", "inductor": "Inductor", "max-autotune": "max-autotune"}
MODES = {"with_kernels": "pbjax", "library": "pbjax, library kernels", **PEERS}
ATTENTION = ("attention", "sdpa")


def runs(tables: Tables) -> dict[str, dict[str, Row]]:
    """Model -> mode -> its row; Conformer-L's of a later run with newer kernels."""
    rows = [r for r in tables["bench_models"]["rows"] if r["row"] != "conformer"]
    rows += tables["bench_conformer"]["rows"]
    return {name: {r["mode"]: r for r in rows if r["row"] == name} for name in NAMES}


def together(tables: Tables) -> dict[str, dict[str, Row]]:
    """Model -> mode -> its row, all six models in one run."""
    rows = tables["bench_six"]["rows"]
    return {name: {r["mode"]: r for r in rows if r["row"] == name} for name in NAMES}


def best_peer(modes: Mapping[str, Row]) -> Row:
    """The fastest program that is not ours."""
    return max((modes[m] for m in PEERS if m in modes), key=lambda row: row["items_per_s"])


def headline(tables: Tables) -> str:
    """The README's table: one line a model."""
    rows = []
    for name, modes in together(tables).items():
        ours, best = modes["with_kernels"], best_peer(modes)
        rows.append(
            (
                NAMES[name],
                given(ours["items_per_s"]),
                given(best["items_per_s"]),
                ratio(ours["items_per_s"] / best["items_per_s"]),
                percent(ours["share_of_bound"]),
            )
        )
    return table(
        ("model, batch", "pbjax, items/s", "best of PyTorch", "ratio", "of the FLOP bound"), rows
    )


def models(tables: Tables) -> str:
    """The page of the six models."""
    found = runs(tables)
    return page(
        "Speed of the six models",
        "Forward passes of the whole batch, unsplit, bfloat16, full size, random weights. Both "
        "sides hold the same weights and inputs. *pbjax* is `models.with_kernels`; *library* is "
        "the same model in plain JAX with cuDNN's attention. The decoders return hidden states. "
        "Why the rows are as they are: [models](../design/models.md).",
        section("All six in one run", headline(tables)),
        section("With library kernels, and Conformer-L of a later run", _speed(found)),
        section(
            "Error of the outputs",
            "Root mean square of the difference from PyTorch's output in float32, over the root "
            "mean square of that output.",
            _errors(found),
        ),
        section(
            "Where the time goes",
            "Device time of one call in ms, by kind of kernel; the call alone, so at a higher "
            "clock than the calls in a row that *wall* is of ([power](../design/power.md)).",
            _kinds(found),
        ),
        section(
            "What overlap could hide",
            "Shares of that device time, and two bounds: everything but products and attention "
            "hidden behind these at no cost; attention hidden behind the products too.",
            _bounds(found),
        ),
        section(
            "Norms folded into products",
            "`models.Kernels(norm='folded')` against norms as kernels, items/s. The folded "
            "variant of each row was timed second, on a warmer card.",
            _folded(tables["bench_folded"]["rows"]),
        ),
        conditions(tables, "bench_six", "bench_models", "bench_conformer", "bench_folded"),
    )


def _speed(found: Mapping[str, Mapping[str, Row]]) -> str:
    modes = ("library", "with_kernels", "eager", "inductor")
    rows = [
        (
            NAMES[name],
            *(given(by[mode]["items_per_s"]) for mode in modes),
            ratio(by["with_kernels"]["items_per_s"] / best_peer(by)["items_per_s"]),
            percent(by["with_kernels"]["share_of_bound"]),
            f"{by['with_kernels']['compile_s']:.0f}",
        )
        for name, by in found.items()
    ]
    columns = ("library", "pbjax", "PyTorch eager", "Inductor", "over best PyTorch")
    return table(("model", *columns, "of the FLOP bound", "compile, s"), rows) + (
        "\n\nThe FLOP bound is the model's FLOPs over 790 TFLOP/s, the rate of a large product. "
        "Compile seconds are of a run in which 24 processes shared 16 cores."
    )


def _errors(found: Mapping[str, Mapping[str, Row]]) -> str:
    modes = ("with_kernels", "library", "eager", "inductor")
    rows = [
        (NAMES[name], *(f"{by[mode]['relative_rms']:.2g}" for mode in modes))
        for name, by in found.items()
    ]
    return table(("model", *(MODES[mode] for mode in modes)), rows)


def split_kinds(row: Row) -> dict[str, float]:
    """Device seconds of a call's products, attention, norms and the rest."""
    seconds = dict.fromkeys(("products", "attention", "norms", "the rest"), 0.0)
    for kernel in row["kernels"]:
        seconds[_kind(kernel["kernel"])] += kernel["seconds"]
    return seconds


def _kind(kernel: str) -> str:
    if any(word in kernel for word in ATTENTION):
        return "attention"
    if "norm" in kernel and "for_norm" not in kernel and "normed" not in kernel:
        return "norms"
    return "products" if "gemm" in kernel or "nvjet" in kernel else "the rest"


def _kinds(found: Mapping[str, Mapping[str, Row]]) -> str:
    rows = []
    for name, by in found.items():
        kinds = split_kinds(by["with_kernels"])
        total, wall = sum(kinds.values()), by["with_kernels"]["seconds"]
        rows.append((NAMES[name], *map(ms, kinds.values()), ms(total), ms(wall)))
    return table(("model", "products", "attention", "norms", "the rest", "sum", "wall"), rows)


def _bounds(found: Mapping[str, Mapping[str, Row]]) -> str:
    rows = []
    for name, by in found.items():
        products, attention, *rest = split_kinds(by["with_kernels"]).values()
        total = products + attention + sum(rest)
        shares = (products, attention, sum(rest))
        rows.append(
            (
                NAMES[name],
                *(percent(share / total) for share in shares),
                f"{total / (products + attention):.2f}x",
                f"{total / products:.2f}x",
            )
        )
    columns = ("products", "attention", "the rest", "the rest hidden", "attention hidden too")
    return table(("model", *columns), rows)


def _folded(rows: Iterable[Row]) -> str:
    by = {(r["row"], r["mode"]): r for r in rows}
    found = []
    for name in dict.fromkeys(row for row, _ in by):
        norms, folded = by[name, "with_kernels"], by[name, "folded norms"]
        gain = folded["items_per_s"] / norms["items_per_s"]
        found.append(
            (
                NAMES[name],
                given(norms["items_per_s"]),
                given(folded["items_per_s"]),
                f"{gain:.3f}",
                ms(split_kinds(norms)["norms"]),
                given(norms["clock_mhz"]),
                given(folded["clock_mhz"]),
            )
        )
    columns = ("norm kernels", "folded", "ratio", "norm kernels, ms", "MHz", "MHz, folded")
    return table(("model", *columns), found)


def peers(tables: Tables) -> str:
    """The page of other programs."""
    document = tables["bench_peers"]
    rows = document["rows"]
    return page(
        "Beside other programs",
        "BERT-Base, 96 x 384, bfloat16, beside three modes of PyTorch, offline and as a server, "
        "and our attention beside tokamax's. How it is measured: [peers](../design/peers.md). All "
        "six models beside eager and Inductor: [models](models.md).",
        section("Offline", _offline(rows)),
        section(
            "Server",
            "Queries arrive one by one as a Poisson process; the rate is the highest at which the "
            "99th percentile of the latency stays within 50 ms.",
            _server(rows),
        ),
        section("tokamax", _tokamax(document["kernels"])),
        conditions(tables, "bench_peers"),
    )


def _offline(rows: Iterable[Row]) -> str:
    ours, *others = sorted(rows, key=lambda row: row["side"] != "jax")
    return table(
        ("program", "ms", "items/s", "pbjax over it", "error", "compile, s", "MHz", "W"),
        [
            (
                MODES[row["mode"]],
                ms(row["seconds"]),
                given(row["items_per_s"]),
                "-" if row is ours else ratio(ours["items_per_s"] / row["items_per_s"]),
                f"{row['relative_rms']:.2g}",
                f"{row['compile_s']:.1f}",
                given(row["clock_mhz"]),
                given(row["power_w"]),
            )
            for row in (ours, *sorted(others, key=lambda row: row["seconds"]))
        ],
    )


def _server(rows: Iterable[Row]) -> str:
    ours, *others = sorted(rows, key=lambda row: -row["server"]["rate_per_s"])
    rate = ours["server"]["rate_per_s"]
    found = []
    for row in (ours, *others):
        server = row["server"]
        found.append(
            (
                MODES[row["mode"]],
                given(server["rate_per_s"]),
                percent(server["rate_per_s"] / row["items_per_s"]),
                ms(server["service_s"]),
                "-" if row is ours else ratio(rate / server["rate_per_s"]),
            )
        )
    columns = ("queries/s", "of offline", "a batch that is waited for, ms", "pbjax over it")
    return table(("program", *columns), found)


def _tokamax(rows: Iterable[Row]) -> str:
    found = [
        (
            row["case"],
            us(row["ours_s"]),
            *(_time(row["tokamax_s"].get(name)) for name in ("mosaic", "triton")),
        )
        for row in rows
        if "ours_s" in row
    ]
    text = "Device time in us, with the tiles that tokamax chooses itself, untuned."
    columns = ("attention", "pbjax", "tokamax, Mosaic", "tokamax, Triton")
    return f"{text}\n\n{table(columns, found)}"


def _time(found: float | str | None) -> str:
    return us(found) if isinstance(found, float) else "did not run"
