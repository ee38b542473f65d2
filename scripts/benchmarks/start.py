"""The two starts of bench_start.py, and the seconds of their parts."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

PROMPT, NEW_TOKENS = 100, 17


def run(args: argparse.Namespace) -> None:
    """Runs both starts in processes and prints them side by side."""
    if args.start:
        print(json.dumps(start(args)))
        return
    with tempfile.TemporaryDirectory() as folder:
        starts = {name: run_start(name, folder) for name in ("cold", "second")}
        kept = [path.stat().st_size for path in Path(folder, "programs").rglob("*-cache")]
    print(table(starts))
    print(f"{len(kept)} programs kept, {sum(kept) / 1e6:.1f} MB")
    provenance = starts["second"].pop("provenance")
    del starts["cold"]["provenance"]
    document = {"schema_version": 1, "provenance": provenance, "layers": args.layers}
    document |= {"kept_programs": len(kept), "kept_bytes": sum(kept), "starts": starts}
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n")


def run_start(name: str, folder: str) -> dict:
    """Runs a start in a process of its own; returns what it prints."""
    command = [sys.executable, *sys.argv, "--start", name, "--folder", folder]
    env = os.environ | {"PBJAX_CACHE_DIR": f"{folder}/programs"}
    command += ["--began", str(time.time())]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def start(args: argparse.Namespace) -> dict:
    """One start: seconds by phase of each of its parts."""
    import jax

    import pbjax
    from pbjax.runtime.phases import Phases
    from pbjax.runtime.program_cache import keep_programs
    from pbjax.runtime.provenance import provenance_here

    kind = jax.devices()[0].device_kind
    parts = Parts(args.start)
    parts.add("import and devices", {"import": time.time() - args.began})
    keep_programs()
    phases = Phases()
    with phases.phase("weights"):
        model = random_model(args.layers, tiny=args.tiny)
        ids = jax.random.randint(jax.random.key(1), (args.batch, args.seq), 0, 500)
        jax.block_until_ready(jax.tree.leaves((model, ids)))
    parts.add("random weights", seconds_of(phases))
    plan = args.folder / "plan.json"
    if args.start == "cold":
        phases = Phases()
        with phases.phase("analyse"):
            make_plan(model, ids, args.split).save(plan)
        parts.add("plan", seconds_of(phases))
    fast = pbjax.optimize(model, ids, plan=plan)
    parts.add("optimize", {phase.name: phase.seconds for phase in fast.report().phases})
    phases = Phases()
    with phases.phase("run"):
        jax.block_until_ready(fast(ids))
    parts.add("first call", seconds_of(phases))
    tokens = ()
    if args.generate:
        phases = Phases()
        with phases.phase("run"):
            prompt = ids[:1, :PROMPT].tolist()
            tokens = pbjax.generate(model, prompt, max_new_tokens=NEW_TOKENS)[0].token_ids
        parts.add("generate", seconds_of(phases))
    command = " ".join(["python", *sys.argv[: sys.argv.index("--start")]])
    return {
        "parts": parts.found,
        "tokens": list(tokens),
        "provenance": asdict(provenance_here(kind, command)),
    }


class Parts:
    """Seconds by phase of the parts of a start, each told on stderr once it is done."""

    def __init__(self, name: str) -> None:
        """Starts with no part.

        Args:
          name: The name of the start, for what is printed.
        """
        self.name, self.found = name, {}

    def add(self, part: str, seconds: dict[str, float]) -> None:
        """Adds the seconds of a part by phase, and prints them."""
        self.found[part] = seconds
        listed = ", ".join(f"{phase} {s:.2f}" for phase, s in seconds.items())
        print(f"{self.name}: {part}: {listed}", file=sys.stderr, flush=True)


def seconds_of(phases) -> dict[str, float]:
    """The seconds of each phase, by name."""
    return {phase.name: phase.seconds for phase in phases.finished()}


def random_model(num_layers: int, *, tiny: bool):
    """LLaMA3-8B with kernels and random weights in bfloat16."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import models
    from models.kernels import with_kernels

    config = replace(models.LlamaConfig.llama3_8b(), num_layers=num_layers)
    if tiny:
        sizes = {"embed_dim": 128, "mlp_dim": 256, "num_heads": 2, "num_kv_heads": 1}
        config = replace(config, **sizes, head_dim=64, vocab_size=512)

    @partial(jax.jit, static_argnums=(1, 2))
    def values(seed, shape, dtype):
        return (0.02 * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)).astype(dtype)

    def made():
        return models.LlamaModel(config, dtype="bfloat16", rngs=nnx.Rngs(0))

    graphdef, state = nnx.split(nnx.eval_shape(made))
    leaves, tree = jax.tree.flatten(state)
    state = jax.tree.unflatten(tree, [values(i, x.shape, x.dtype) for i, x in enumerate(leaves)])
    return with_kernels(nnx.merge(graphdef, state))


def make_plan(model, ids, sizes: list[int]):
    """A plan of these sub-batches, each a stage ahead of the next; nothing is measured."""
    import jax

    from pbjax.device import find_device
    from pbjax.planning.plan import Plan, Seconds
    from pbjax.program.analysis import analyse

    device = find_device(jax.devices()[0].device_kind, num_cores=os.cpu_count() or 1)
    analysis = analyse(model, (ids,), device=device)
    return Plan(
        model=analysis.model.name,
        fingerprint=analysis.fingerprint,
        device_kind=device.kind,
        jax=jax.__version__,
        batch_size=len(ids),
        sizes=tuple(sizes),
        staggers=tuple(reversed(range(len(sizes)))),
        unroll=1,
        compiler_options={},
        decision="split" if len(sizes) > 1 else "unsplit",
        reason="made to time a start",
        digest="",
        predicted=Seconds(),
        measured=Seconds(),
        max_difference=None,
        date="",
    )


def table(starts: dict[str, dict]) -> str:
    """Seconds of both starts by part and phase."""
    from pbjax.text_tables import table_text

    both = [starts[name]["parts"] for name in ("cold", "second")]
    rows = []
    for part in both[0]:
        phases = [parts.get(part, {}) for parts in both]
        rows.append((part, *(sum(seconds.values()) for seconds in phases)))
        for name in dict.fromkeys([*phases[0], *phases[1]]):
            rows.append((f"  {name}", *(seconds.get(name, 0.0) for seconds in phases)))
    rows.append(("all", *(sum(sum(p.values()) for p in parts.values()) for parts in both)))
    cells = ((name, f"{cold:.2f}", f"{second:.2f}") for name, cold, second in rows)
    return table_text("", ("seconds", "cold", "second"), cells)
