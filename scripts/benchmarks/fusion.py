"""The rows of bench_fusion.py: three programs of a model, verified and timed, in a process each."""

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

READY_S, TURN_S = 240, 300
NAMES = ("plain", "unsplit", "kernels")  # In plain JAX, fused, by with_kernels.
COLUMNS = (
    *("row", "batch", "layers", "plain", "fused", "kernels", "fused/plain", "fused/kernels"),
    *("diff fused", "diff kernels", "compile s"),
)


def run(args: argparse.Namespace) -> None:
    """Runs the rows."""
    # Several processes share the device's memory.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    context = multiprocessing.get_context("spawn")
    found, turn = context.Queue(), context.Lock()
    ready = context.Barrier(len(args.rows))
    jobs = [
        context.Process(target=run_row, args=(name, args.layers, args.tiny, ready, turn, found))
        for name in args.rows
    ]
    for job in jobs:
        job.start()
    rows = [found.get(timeout=READY_S + TURN_S) for _ in jobs]
    for job in jobs:
        job.join()
    rows.sort(key=lambda row: args.rows.index(row["row"]))
    print(table(rows))
    result = {"schema_version": 1, "provenance": provenance(sys.argv), "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    if any("error" in row for row in rows):
        sys.exit(1)


def run_row(name: str, layers: int, tiny: bool, ready, turn, found) -> None:
    """A row, in a process of its own; puts what came of it into a queue."""
    row = {"row": name}
    try:
        row |= measured(name, layers, tiny, ready, turn)
    except Exception as error:  # Reported, so that the other rows still count.
        traceback.print_exc()
        ready.abort()
        row["error"] = f"{type(error).__name__}: {error}".split("\n")[0]
    found.put(row)


def measured(name: str, layers: int, tiny: bool, ready, turn) -> dict:
    """Compiles, verifies and times the three programs of a row."""
    import jax

    from models.kernels import with_kernels
    from pbjax.device import find_device
    from pbjax.program.analysis import analyse
    from pbjax.runtime.compilation import ProgramSpec
    from pbjax.tuning.autotune import measure
    from pbjax.tuning.calls import CallWorkload, StackedWeights

    model, inputs = ROWS[name](layers, tiny)
    kind = jax.devices()[0].device_kind
    device = find_device(kind, num_cores=os.cpu_count())
    leaves = tuple(jax.tree.leaves(inputs))
    whole = ProgramSpec(sizes=(leaves[0].shape[0],), staggers=(0,))
    start = time.perf_counter()
    fused = analyse(model, inputs, device=device, fuse="all")
    analyse_s = time.perf_counter() - start
    called = analyse(with_kernels(model), inputs, device=device, fuse="none")
    fused_call, kernel_call = (
        CallWorkload(analysis=analysis, stacked=StackedWeights(analysis), leaves=leaves)
        for analysis in (fused, called)
    )
    specs = {
        "plain": (fused_call, replace(whole, plain=True)),
        "unsplit": (fused_call, whole),
        "kernels": (kernel_call, whole),
    }

    def built(workload, spec):
        lowered = workload.lower(spec)
        return lowered.finish(*lowered.compile())

    with ThreadPoolExecutor() as pool:  # What compiles in C++ leaves Python free for the next.
        futures = {
            which: pool.submit(built, workload, spec) for which, (workload, spec) in specs.items()
        }
        start = time.perf_counter()
        fused.probe.verify()
        verify_s = time.perf_counter() - start
        programs = {which: future.result() for which, future in futures.items()}
    plain = programs["plain"]
    differences = {
        which: max(fused_call.differences([programs[which]], plain, silent))
        for which in ("unsplit", "kernels")
    }
    print(f"{name}: compiled\n{fused.fusion}", flush=True)
    wait(ready)
    with turn:
        timed = [each.row() for each in measure(fused_call, list(programs.values()), silent)]
    return {
        "batch_size": leaves[0].shape[0],
        "shape": list(leaves[0].shape),
        "num_layers": model.config.num_layers,
        "fusion": fused.fusion.to_dict(),
        "analyse_s": analyse_s,
        "verify_matches_s": verify_s,
        "programs": {
            which: {
                "measured_s": t.measured_s,
                "spread_s": t.spread_s,
                "compile_s": t.compile_s,
                "temporary_bytes": t.temporary_bytes,
                "weight_bytes": t.weight_bytes,
                "max_difference": differences.get(which),
            }
            for which, t in zip(programs, timed, strict=True)
        },
    }


def silent(done: int, total: int, item: str) -> None:
    """Takes progress and says nothing."""


def wait(ready) -> None:
    """Until all rows have compiled; one that failed does not keep the others from measuring."""
    try:
        ready.wait(READY_S)
    except Exception as error:
        print(f"not all rows are ready: {type(error).__name__}", flush=True)


def bert(layers: int, tiny: bool, *, masked: bool = False):
    """BERT-Base, 96 sequences of 384 tokens; with a padding mask, all sequences are whole."""
    import jax.numpy as jnp

    import models

    config = models.BertConfig.base()
    if tiny:
        config = replace(config, num_layers=2, embed_dim=64, mlp_dim=128, num_heads=4)
    batch, length = (4, 64) if tiny else (96, 384)
    ids = token_ids(batch, length, config.vocab_size)
    mask = (jnp.ones((batch, length), jnp.int32),) if masked else ()
    return made(lambda **how: models.BertModel(config, **how)), (ids, *mask)


def bert_masked(layers: int, tiny: bool):
    """The same with a padding mask that is data."""
    return bert(layers, tiny, masked=True)


def vit(layers: int, tiny: bool):
    """ViT-Base with 16 x 16 patches, 256 images."""
    import jax
    import jax.numpy as jnp

    import models

    config = models.ViTConfig.base()
    if tiny:
        config = replace(config, num_layers=2, embed_dim=64, mlp_dim=128, num_heads=4)
    shape = (4 if tiny else 256, 3, config.image_size, config.image_size)
    pixels = jax.jit(lambda: jax.random.normal(jax.random.key(1), shape, jnp.bfloat16))()
    return made(lambda **how: models.ViTModel(config, **how)), (pixels,)


def llama(layers: int, tiny: bool):
    """Few layers of LLaMA3-8B without its head, 8 sequences of 512 tokens."""
    import models

    config = replace(models.LlamaConfig.llama3_8b(), num_layers=layers, lm_head=False)
    if tiny:
        config = replace(
            config,
            num_layers=2,
            embed_dim=64,
            mlp_dim=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            vocab_size=100,
        )
    ids = token_ids(2 if tiny else 8, 64 if tiny else 512, config.vocab_size)
    return made(lambda **how: models.LlamaModel(config, **how)), (ids,)


ROWS: dict[str, Callable] = {"bert": bert, "bert masked": bert_masked, "vit": vit, "llama": llama}


def token_ids(batch: int, length: int, vocab_size: int):
    """Random tokens."""
    import jax

    return jax.random.randint(jax.random.key(1), (batch, length), 0, vocab_size)


def made(build: Callable):
    """A module with random weights in bfloat16, made on the device."""
    from flax import nnx

    return nnx.jit(lambda: build(dtype="bfloat16", rngs=nnx.Rngs(0)))()


def table(rows: list[dict]) -> str:
    """Milliseconds of each program, speedups and differences from plain JAX."""
    from pbjax.text_tables import table_text

    cells, failed = [], []
    for row in rows:
        if "error" in row:
            failed.append(f"{row['row']}: {row['error']}")
            continue
        programs = row["programs"]
        seconds = [programs[key]["measured_s"] for key in NAMES]
        plain, fused, kernels = seconds
        differences = (programs[key]["max_difference"] for key in ("unsplit", "kernels"))
        cells.append(
            (
                row["row"],
                row["batch_size"],
                row["num_layers"],
                *(f"{1e3 * each:.2f}" for each in seconds),
                f"{plain / fused:.2f}x",
                f"{kernels / fused:.2f}x",
                *(f"{each:.2e}" for each in differences),
                " ".join(f"{programs[key]['compile_s']:.0f}" for key in NAMES),
            )
        )
    return "\n".join([table_text("ms of a call", COLUMNS, cells), *failed])


def provenance(argv: list[str]) -> dict:
    """The device, software and command of the measurement."""
    import jax

    from pbjax.runtime.provenance import provenance_here

    command = " ".join(["python", "scripts/bench_fusion.py", *argv[1:]])
    return asdict(provenance_here(jax.devices()[0].device_kind, command))
