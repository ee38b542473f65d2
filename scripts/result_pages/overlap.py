"""Sub-batches: splits of forward passes, decode steps, fusion, and the search by itself."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from result_pages.markdown import (
    Tables,
    conditions,
    error,
    ms,
    number,
    page,
    percent,
    ratio,
    section,
    table,
    us,
)

Row = Mapping[str, Any]
MODELS = {"bert": "BERT-Base, 96 x 384", "conformer": "Conformer-L, 32 x 512"}
WHOLE = ("unsplit", "96 0 all SMs in sequence", "32 0 all SMs in sequence")
TITLES = {"unsplit": "the model as it is", WHOLE[1]: "whole batch, scanned"}
TITLES |= {WHOLE[2]: "whole batch, scanned"}
PROGRAMS = {"unsplit": "fused", "kernels": "kernels by hand", "plain": "plain JAX"}


def fusion(tables: Tables) -> str:
    """The page of fusion."""
    names = {"bert": "BERT-Base, 96 x 384", "bert masked": "the same with a padding mask of ones"}
    names |= {"vit": "ViT-Base, 256 images", "llama": "LLaMA3-8B, no head, 8 x 512"}
    rows = []
    for row in tables["bench_fusion"]["rows"]:
        seconds = {name: row["programs"][name]["measured_s"] for name in PROGRAMS}
        rows.append(
            (
                f"{names[row['row']]}, {row['num_layers']} layers",
                *(ms(seconds[name]) for name in ("plain", "unsplit", "kernels")),
                ratio(seconds["plain"] / seconds["unsplit"]),
                f"{row['fusion']['operations_before']:,} to {row['fusion']['operations_after']}",
                f"{row['verify_matches_s']:.0f}",
            )
        )
    columns = ("plain JAX, ms", "fused, ms", "kernels by hand, ms", "fused over plain")
    return page(
        "Fusion",
        "Plain Flax models through `pbjax.optimize`, unsplit, against the same model as it was "
        "given. *Kernels by hand* is the model whose layers call kernels "
        "(`models.with_kernels`). Median of five samples in turn. How it works: "
        "[fusion](../design/fusion.md).",
        table(("model", *columns, "operations", "verifying, s"), rows),
        conditions(tables, "bench_fusion"),
    )


def ablation(tables: Tables) -> str:
    """The page of splits of forward passes."""
    document = tables["bench_ablation"]
    rows = document["rows"]
    return page(
        "What the parts of a split are worth",
        "Programs with the same kernels, calls queued for 0.15 s, five samples in turn; the best "
        "of each kind is in the figure. *Over whole* is against the fastest whole-batch program "
        "of all, *over the model* against the model in the same process. A label has sizes, "
        "staggers, SM budgets (products + the rest); one that stands twice ran in two processes. "
        "Why it is so: [overlap](../design/overlap.md)."
        "\n\n![Speed of split programs over the whole batch](../figures/ablation.png)",
        *(_model(rows, name) for name in MODELS),
        section(
            "A product beside decode attention",
            "Gate and up of LLaMA3-8B, 512 rows, beside 272 sequences of 512 tokens. *Busy* is "
            "the device time of a burst of three calls.",
            _pair([row for row in rows if row["model"] == "pair"]),
        ),
        section(
            "The search",
            "Ten random tables, 4 stages, 12 blocks, medians, on 2 CPU cores. The limit is 80 % of "
            "what the unsplit program needs; *over* counts plans that need more.",
            _search(document["search"]["rows"]),
        ),
        conditions(tables, "bench_ablation"),
    )


def _model(rows: Sequence[Row], name: str) -> str:
    own = [row for row in rows if row["model"] == name]
    ran = sorted((row for row in own if "seconds" in row), key=lambda row: row["seconds"])
    whole = min(row["seconds"] for row in ran if row["label"] in WHOLE)
    failed = [row for row in own if "error" in row]
    long_run = [
        (
            TITLES.get(row["label"], row["label"]),
            ms(row["seconds"]),
            ms(row["spread_s"]),
            ratio(whole / row["seconds"]),
            ratio(row["over_unsplit"]),
        )
        for row in ran
    ]
    note = f"{len(failed)} splits more were not compiled in the time given." if failed else ""
    traced = [row for row in ran if "busy_s" in row]
    return section(
        MODELS[name],
        table(("program", "ms", "spread", "over whole", "over the model"), long_run),
        note,
        "Device time of a call, by a trace of three: *busy* is the time in which any kernel runs, "
        "*hidden* the share of the memory-bound kernels' time in which a Tensor-Core kernel ran.",
        _device_time(traced),
    )


def _device_time(rows: Iterable[Row]) -> str:
    rows = list(rows)
    whole = next(row["busy_s"] for row in rows if row["label"] in WHOLE)
    columns = ("busy, ms", "Tensor-Core kernels", "the rest", "hidden", "over whole")
    return table(
        ("program", *columns, "temporaries, MB"),
        [
            (
                TITLES.get(row["label"], row["label"]),
                ms(row["busy_s"]),
                ms(row["tensor_s"]),
                ms(row["memory_s"]),
                percent(row["overlapped_share"]),
                ratio(whole / row["busy_s"]),
                f"{row['temporary_bytes'] / 1e6:,.0f}",
            )
            for row in rows
        ],
    )


def _pair(rows: Sequence[Row]) -> str:
    base = next(row for row in rows if row["label"] == "in sequence")
    return table(
        ("program", "busy, us", "ratio", "long run, us", "ratio", "hidden"),
        [
            (
                row["label"],
                us(row["busy_s"]),
                ratio(base["busy_s"] / row["busy_s"]),
                us(row["seconds"]),
                ratio(base["seconds"] / row["seconds"]),
                "in the kernel"
                if "one launch" in row["label"]
                else percent(row["overlapped_share"]),
            )
            for row in rows
        ],
    )


def _search(rows: Iterable[Row]) -> str:
    columns = ("search", "predictions", "seconds", "best found, of 10", "worst gap", "over")
    return table(
        ("batch", *columns),
        [
            (
                f"{row['batch']:,}",
                row["search"],
                number(row["evaluations"]),
                f"{row['seconds']:.2f}",
                row["found_best"],
                f"{row['worst_gap_percent']:.1f} %",
                row["over_limit"],
            )
            for row in rows
        ],
    )


def steps(tables: Tables) -> str:
    """The page of decode steps."""
    return page(
        "Decode steps",
        "A decode step of 6 LLaMA3-8B layers without a head, bfloat16, calls that follow each "
        "other; batch x cached tokens. Why: [decode step](../design/decode_step.md).",
        section(
            "By optimize",
            "Milliseconds, predictions in brackets; *overlapped* is the share of the attention "
            "that runs inside products.",
            _steps(tables["bench_step"]["rows"]),
        ),
        section(
            "Measured again",
            "The same with given sizes in another run: the gain depends on the card and the day.",
            _steps(tables["bench_step_again"]["rows"]),
        ),
        section(
            "Two kernels of one graph",
            "The same overlap without co-run kernels: two sequences of kernels in one CONCURRENT "
            "graph, products and reading each with an SM budget. Medians of four processes. Not "
            "part of `optimize`.",
            _graphs(tables["bench_graph_step"]["rows"]),
        ),
        conditions(tables, "bench_step", "bench_step_again", "bench_graph_step"),
    )


def whole(tables: Tables) -> str:
    """The page of programs of the whole batch."""
    return page(
        "The whole batch: as written, scanned, one graph",
        "Forward passes of small batches in plain JAX with the kernels that fusion finds, "
        "bfloat16, random weights; programs of one process, timed in turn. *one graph* is the "
        "whole program as one CONCURRENT CUDA graph; *scanned* runs the layers in one loop. "
        "`optimize` compares them all and keeps the fastest. Why: "
        "[method](../design/method.md).",
        section("Milliseconds a call", _whole(tables["bench_whole"]["rows"])),
        conditions(tables, "bench_whole"),
    )


def _whole(rows: Iterable[Row]) -> str:
    found = [
        (
            row["case"].replace(":", ", "),
            label.removeprefix("unsplit").removeprefix(", ") or "as written",
            ms(seconds),
            ratio(row["seconds"]["unsplit"] / seconds),
            "kept" if label == row["kept"] else "",
        )
        for row in rows
        for label, seconds in row["seconds"].items()
    ]
    return table(("model, batch x length", "program", "ms", "over as written", ""), found)


def _steps(rows: Iterable[Row]) -> str:
    found = []
    for row in rows:
        seconds, predicted = row["seconds"], row["predicted_s"]
        given = ", given" if "was given" in row["reason"] else ""
        found.append(
            (
                f"{row['batch']:,} x {row['context']:,}",
                " + ".join(map(str, row["sizes"])) + given,
                *(
                    f"{ms(seconds[name])} ({ms(predicted[name])})"
                    for name in ("unsplit", "sequential", "interleaved")
                ),
                ratio(seconds["unsplit"] / seconds["interleaved"]),
                percent(row["overlapped_fraction"]),
                row["decision"],
                f"{row['tokens_per_s_at_32_layers']:,}",
            )
        )
    columns = ("sizes", "unsplit", "in sequence", "interleaved", "over unsplit", "overlapped")
    last = ("kept", "tokens/s at 32 layers")
    return table(("batch x context", *columns, *last), found)


def _graphs(rows: Iterable[Row]) -> str:
    found, whole = [], {}
    for row in rows:
        size = f"{row['batch']:,} x {row['context']:,}"
        device, long = _median(row["device_s_of_a_call"]), _median(row["sustained_s"])
        if row["program"] == "unsplit":
            whole[size] = device, long
        turns = {None: "", True: ", in turns", False: ", as they come"}[row["in_turns"]]
        base = whole[size]
        found.append(
            (
                size,
                row["program"].replace("+", " + ") + turns,
                ms(device),
                ratio(base[0] / device),
                ms(long),
                ratio(base[1] / long),
            )
        )
    columns = ("SMs: products + reading", "device, ms", "over unsplit", "long run, ms")
    return table(("batch x context", *columns, "over unsplit"), found)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def predicted(tables: Tables) -> str:
    """The page of stage tables and what they predict of the whole batch."""
    rows = []
    for row in tables["bench_predicted"]["rows"]:
        stages = tables[row["model"]]
        length = f" x {row['length']}" if row["length"] else ""
        split = " + ".join(map(str, row["split"]))
        rows.append(
            (
                f"{row['model']}, {row['batch_size']}{length}",
                f"{len(stages['rows'])}, {len(stages['corun'])}",
                ms(row["predicted_s"]),
                ms(row["measured_s"]),
                error(row["predicted_s"], row["measured_s"]),
                percent(row["spread_s"] / row["measured_s"], 1),
                number(row["clock_mhz"]),
                f"{split}: {row['predicted_s'] / row['split_predicted_s']:.3f}x",
            )
        )
    columns = ("rows, pairs", "predicted, ms", "measured, ms", "error", "spread", "MHz")
    return page(
        "Predicted and measured: whole models from their stage tables",
        "What each shipped table of stages predicts of the whole batch, and what the model takes, "
        "calls back to back. The last column is the best split that the table predicts, over the "
        "whole batch. Models call kernels and end at their last hidden states. Why: "
        "[stages](../design/stages.md); the format: [profiles](../../profiles/README.md).",
        table(("model", *columns, "best split, predicted"), rows),
        conditions(tables, "bench_predicted", *(row["model"] for row in _models(tables))),
    )


def _models(tables: Tables) -> Iterable[Row]:
    return tables["bench_predicted"]["rows"]
