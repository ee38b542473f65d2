"""Kernels beside their opponents: products, attention, norms, co-run launches, long runs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pallas_kernels.gemm.shapes import SHAPES, GemmShape
from result_pages.markdown import (
    Tables,
    conditions,
    number,
    page,
    percent,
    ratio,
    section,
    table,
    us,
)

Row = Mapping[str, Any]
ALONE = ", product alone"
LONG_S = 2.5e-4  # Of a burst: shorter ones end while the host reads the clock.
BY_NAME = {shape.name: shape for shape in SHAPES}


def gemm(tables: Tables) -> str:
    """The page of products."""
    rows = [row for row in tables["bench_kernels"]["rows"] if row["kernel"] == "gemm"]
    products, others = _divided(rows)
    return page(
        "GEMM",
        "Products of the six models against cuBLASLt through XLA, which takes what it can of the "
        "epilogue into the library call; device time, kernel and opponent in turns. Bold: the "
        "opponent is faster. How the kernel works: [kernels](../design/kernels.md).",
        section(
            "Alone, and with the model's epilogue",
            "A dash: the product is gated, or its shape stands under another model's name.",
            _products(products),
        ),
        section(
            "Sub-batches that share a weight",
            "One launch of `grouped_gemm` against one call for each sub-batch.",
            versus(others),
        ),
        section(
            "Few rows",
            "LLaMA3-8B's products in a decode step, with their epilogues, by our kernel even where "
            "`gemm` leaves them to XLA.",
            _products(_divided(tables["bench_few_rows"]["rows"])[0]),
        ),
        conditions(tables, "bench_kernels", "bench_few_rows"),
    )


def gemm_8bit(tables: Tables) -> str:
    """The page of products of 8 bits."""
    rows = tables["bench_gemm_8bit"]["rows"]
    return page(
        "GEMM of 8 bits",
        "Products of the six models in FP8 (e4m3) and int8, with a scale for each row and column; "
        "device time, kernel and opponent in turns. Alone: ours with scales against cuBLASLt's "
        "product without, of int8 to int32. With the epilogue: against XLA, which runs scales and "
        "epilogue as a kernel of its own. A few rows are ours even where `quantized_gemm` leaves "
        "them to XLA. Bold: the opponent is faster. How the kernel works: "
        "[kernels of 8 bits](../design/kernels_8bit.md).",
        *(
            section(title, _products(_of_kind(rows, kind), opponent="XLA"))
            for title, kind in (("FP8", "float8_e4m3fn"), ("int8", "int8"))
        ),
        section(
            "Results of 8 bits, over one scale",
            versus(row for row in rows if row["case"].endswith("result")),
        ),
        section(
            "FP8 with promoted sums",
            "Against XLA with the highest precision, which has cuBLASLt promote sums too.",
            versus(row for row in rows if row["case"].endswith("promoted")),
        ),
        section(
            "In a long run",
            "Wall time of a call, two turns of 0.4 s. The clock is read after every 24 calls, "
            "some milliseconds in which the SMs idle: only calls of 0.25 ms and more are here.",
            _long(row for row in rows if "ours_wall_s" in row and row["ours_s"] >= LONG_S),
        ),
        conditions(tables, "bench_gemm_8bit"),
    )


def _of_kind(rows: Iterable[Row], kind: str) -> list[Row]:
    """Rows of operands of a kind, with their cases named by the product alone."""
    ending = f", {kind}"
    return [
        {**row, "case": row["case"].removesuffix(ending)}
        for row in rows
        if row["case"].endswith(ending)
    ]


def _divided(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Rows of single products, and the rest."""
    found: tuple[list[Row], list[Row]] = [], []
    for row in rows:
        found[row["case"].removesuffix(ALONE) not in BY_NAME].append(row)
    return found


def _products(rows: Sequence[Row], opponent: str = "cuBLASLt") -> str:
    alone = {row["case"].removesuffix(ALONE): row for row in rows if row["case"].endswith(ALONE)}
    found = []
    for row in rows:
        if row["case"].endswith(ALONE):
            continue
        shape, single = BY_NAME[row["case"]], alone.get(row["case"])
        found.append(
            (
                f"{shape.name} {shape.m}x{shape.k}x{shape.n}",
                "-" if single is None else number(single["flops_per_s"] / 1e12),
                "-" if single is None else _fine(single["speedup"]),
                epilogue(shape),
                us(row["ours_s"]),
                us(row["opponent_s"]),
                _fine(row["speedup"]),
            )
        )
    columns = ("TFLOP/s alone", "ratio alone", "epilogue", "us", f"{opponent}, us", "ratio")
    return table(("product", *columns), found)


def _fine(value: float) -> str:
    return f"**{value:.3f}**" if value < 0.99 else f"{value:.3f}"


def epilogue(shape: GemmShape) -> str:
    """What follows a product in its model."""
    act = {"gelu_tanh": "tanh GELU", "gelu": "GELU", "silu": "SiLU"}.get(shape.activation or "")
    words = [
        "bias" if shape.bias else "",
        f"{act or shape.activation} gate" if shape.gated else act or "",
        "residual" if shape.residual else "",
    ]
    return ", ".join(word for word in words if word) or "none"


def versus(rows: Iterable[Row], *, bandwidth: bool = False) -> str:
    """Any kernel beside its opponents: us, rate, ratio."""
    rate, unit = ("bytes_per_s", "TB/s") if bandwidth else ("flops_per_s", "TFLOP/s")
    return table(
        ("case", "us", unit, "of the bound", "opponent", "its us", "ratio"),
        [
            (
                row["case"],
                us(row["ours_s"]),
                number(row[rate] / 1e12),
                percent(row["share_of_bound"]),
                row["opponent"],
                us(row["opponent_s"]),
                ratio(row["speedup"]),
            )
            for row in rows
        ],
    )


def attention(tables: Tables) -> str:
    """The page of attention, over whole sequences and over a KV cache."""
    rows = tables["bench_kernels"]["rows"]
    whole = [row for row in rows if row["kernel"] == "attention"]
    sweep = [row for row in whole if row["case"][0].isdigit()]
    return page(
        "Attention",
        "Device time of all launches. Bold: the opponent is faster. How the kernels work: "
        "[attention](../design/attention.md).",
        section(
            "Against cuDNN over length and width",
            "Tokens of a sequence x heads x head size; 16,384 tokens in all (18,432 where a "
            "sequence has 384).",
            versus(sweep),
        ),
        section(
            "The attention of models",
            "*Packed* is against cuDNN on padded sequences. On 66 SMs the opponent has all 132.",
            versus(row for row in whole if row not in sweep),
        ),
        section(
            "Softcaps and a number for each key",
            "cuDNN has no softcap, so that its time is of less work. Of BERT's keys half are "
            "hidden, drawn at random: cuDNN is given a bias.",
            versus(tables["bench_softcap"]["rows"] + tables["bench_key_bias"]["rows"]),
        ),
        section(
            "Decode attention",
            "Over a KV cache: sequences x cached tokens. On 48 SMs the opponent has all 132.",
            versus((r for r in rows if r["kernel"] == "decode_attention"), bandwidth=True),
        ),
        conditions(tables, "bench_kernels", "bench_softcap", "bench_key_bias"),
    )


def norms(tables: Tables) -> str:
    """The page of norms."""
    rows = [row for row in tables["bench_kernels"]["rows"] if row["kernel"] == "norm"]
    return page(
        "Norms",
        "LayerNorm and RMSNorm with their residual sum, unless said otherwise, against XLA's "
        "fusion on all SMs; int8 and fp8 are quantised results with a scale for each row. The "
        "bound is all bytes at 4.3 TB/s. How the kernel works: [kernels](../design/kernels.md).",
        section("Against XLA", versus(rows, bandwidth=True)),
        conditions(tables, "bench_kernels"),
    )


def corun(tables: Tables) -> str:
    """The page of products beside other work in one launch."""
    rows = [row for row in tables["bench_kernels"]["rows"] if row["kernel"] == "corun"]
    return page(
        "Co-run: a GEMM and other work in one launch",
        "Device time of short bursts; *wall* is the ratio of calls back to back. A decode layer is "
        "two half layers. Bold: the opponent is faster. In a long run: [sustained](sustained.md). "
        "Why: [co-run](../design/corun.md).",
        section("Against both in sequence", _walls(rows)),
        conditions(tables, "bench_kernels"),
    )


def _walls(rows: Iterable[Row]) -> str:
    return table(
        ("case", "us", "opponent", "its us", "ratio", "wall"),
        [
            (
                row["case"],
                us(row["ours_s"]),
                row["opponent"],
                us(row["opponent_s"]),
                ratio(row["speedup"]),
                ratio(row["opponent_wall_s"] / row["ours_wall_s"]),
            )
            for row in rows
        ],
    )


def sustained(tables: Tables) -> str:
    """The page of kernels in a long run."""
    names = {"corun": "Co-run", "decode_attention": "Decode attention", "gemm": "GEMM"}
    rows = tables["bench_sustained"]["rows"]
    return page(
        "Kernels in a long run",
        "*Burst* is the device time of three calls after a pause; *long* the wall time of calls "
        "back to back for a second, after 0.4 s of the same. Joules are the driver's energy "
        "counter, good to some 8 %. Launches shorter than some 0.2 ms are bound by Python in the "
        "long run. What it means: [power](../design/power.md).",
        *(
            section(title, _long(row for row in rows if row["kernel"] == kernel))
            for kernel, title in names.items()
        ),
        conditions(tables, "bench_sustained"),
    )


def _long(rows: Iterable[Row]) -> str:
    columns = ("burst, us", "long, us", "J", "MHz", "opponent", "its burst", "long", "J", "MHz")
    return table(
        ("case", *columns, "burst ratio", "long ratio"),
        [
            (
                row["case"],
                *_figures(row, "ours"),
                row["opponent"],
                *_figures(row, "opponent"),
                ratio(row["speedup"]),
                ratio(row["speedup_wall"]),
            )
            for row in rows
        ],
    )


def _figures(row: Row, side: str) -> tuple[str, ...]:
    clock = f"{row[f'{side}_mhz']:,.0f}"
    return us(row[f"{side}_s"]), us(row[f"{side}_wall_s"]), f"{row[f'{side}_joules']:.2f}", clock


def slower(tables: Tables) -> str:
    """Cases of the kernel benchmarks in which an opponent on the same SMs is faster."""
    found: dict[tuple[str, str], Row] = {}
    names = (
        "bench_kernels",
        "bench_few_rows",
        "bench_softcap",
        "bench_key_bias",
        "bench_gemm_8bit",
    )
    for row in (row for name in names for row in tables[name]["rows"]):
        case = row["kernel"], row["case"]
        ours = row["opponent"].startswith("ours")
        if (
            row["speedup"] < 0.985
            and not ours
            and not row["case"].endswith("SMs")
            and ALONE not in row["case"]
        ):
            found[case] = min(row, found.get(case, row), key=lambda row: row["speedup"])
    return table(
        ("kernel", "case", "opponent", "ratio"),
        [
            (kernel, case, row["opponent"], f"{row['speedup']:.2f}")
            for (kernel, case), row in sorted(found.items(), key=lambda item: item[1]["speedup"])
        ],
    )
