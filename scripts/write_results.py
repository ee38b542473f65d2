#!/usr/bin/env python3
"""Writes docs/results and the marked tables of other pages from profiles/; --check only compares.

python scripts/write_results.py            # after a measurement
python scripts/write_results.py --check    # exits 1 and names each page that differs
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from result_pages import kernels, models, overlap, rooflines
from result_pages.markdown import Tables, page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "models": (models.models, "the six models beside PyTorch, and where their time goes"),
    "peers": (models.peers, "BERT-Base beside max-autotune, as a server, and tokamax"),
    "fusion": (overlap.fusion, "plain Flax models with kernels put in place"),
    "optimize": (None, "everything that `optimize` prints of BERT-Base, splits included"),
    "ablation": (overlap.ablation, "splits of forward passes, a product beside decode attention"),
    "whole": (overlap.whole, "the whole batch as written, in one loop, and as one graph"),
    "steps": (overlap.steps, "decode steps as two interleaved sub-batches"),
    "gemm": (kernels.gemm, "matrix products against cuBLASLt"),
    "gemm_8bit": (kernels.gemm_8bit, "products of FP8 and int8 against cuBLASLt and XLA"),
    "attention": (kernels.attention, "attention and decode attention against cuDNN"),
    "norms": (kernels.norms, "norms against XLA"),
    "corun": (kernels.corun, "a product beside other work in one launch"),
    "sustained": (kernels.sustained, "kernels in a long run: clock and joules"),
    "predicted": (overlap.predicted, "whole models as their stage tables predict them"),
    "roofline": (rooflines.stages, "stages and models as the roofline predicts them"),
    "ceilings": (rooflines.ceilings, "what an H200 sustains, beside its datasheet"),
    "start": (rooflines.start, "the first and the second start of a plan"),
}
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MARKED_PAGES = ("README.md", "docs/guide/roofline.md")


def main() -> int:
    """Writes the pages, or compares them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 on a difference"
    )
    args = parser.parse_args()
    return check(ROOT) if args.check else write(ROOT)


def write(root: Path) -> int:
    """Writes every page that differs."""
    for path, text in written(root):
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path.relative_to(root)}")
    return 0


def check(root: Path) -> int:
    """Names every page that differs from the measured files; 1 if there is one."""
    found = [path for path, text in written(root) if not path.exists() or path.read_text() != text]
    for path in found:
        name = path.relative_to(root)
        print(
            f"{name}: differs from profiles/; run python scripts/write_results.py", file=sys.stderr
        )
    return int(bool(found))


def written(root: Path) -> Iterator[tuple[Path, str]]:
    """Each page that is written from measured files, and its text."""
    folder = root / "profiles" / "nvidia_h200"
    tables = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    results = root / "docs" / "results"
    yield results / "README.md", index(tables)
    for name, (make, _) in PAGES.items():
        text = make(tables) if make else optimize((folder / "optimize_bert.txt").read_text())
        yield results / f"{name}.md", text
    marked = {"models": models.headline(tables), "devices": rooflines.device_rates()}
    for name in MARKED_PAGES:
        path = root / name
        yield path, filled(path.read_text(), marked)


def index(tables: Tables) -> str:
    """The list of pages, and the cases in which an opponent is faster."""
    lines = [f"- [{name}]({name}.md): {what}" for name, (_, what) in PAGES.items()]
    return page(
        "Results",
        "Everything here is written by `scripts/write_results.py` from the files in "
        "[profiles](../../profiles/README.md); a test compares. Each page ends with its "
        "conditions: device, versions, commit, date, command.",
        "\n".join(lines),
        "## Where an opponent is faster\n\nKernels on all SMs, with the model's epilogue, below "
        "0.985 times the best opponent. Products of few rows are left to XLA for that reason.",
        kernels.slower(tables),
    )


def optimize(printed: str) -> str:
    """What `optimize` printed, as it is."""
    return page(
        "What optimize prints",
        "The report of `scripts/bench_optimize.py`, whole: BERT-Base in plain Flax, 96 x 384, with "
        "a mask of ones, which was then a bias of whole size. What its words mean: "
        "[optimize](../guide/optimize.md). Conditions are in its first lines.",
        f"```\n{printed.rstrip()}\n```",
    )


def filled(text: str, marked: dict[str, str]) -> str:
    """A page with its marked tables written anew."""
    return MARKED.sub(lambda found: f"{found[1]}\n{marked[found[2]]}\n\n{found[3]}", text)


if __name__ == "__main__":
    sys.exit(main())
