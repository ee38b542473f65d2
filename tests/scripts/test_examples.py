"""The Python of README and docs runs: the blocks of a page one after the other, in a new folder."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)  # not ```python no-run
LONG = {"embedding", "generation", "kernels_8bit", "models", "optimize"}  # A minute and more.
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if BLOCK.search(page.read_text())
]


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.long) if p.stem in LONG else p for p in PAGES],
    ids=lambda page: page.stem,
)
def test_examples_run(page, tmp_path, monkeypatch, capsys):
    os.symlink(ROOT / "tests", tmp_path / "tests")
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), names)
    assert capsys.readouterr().out


def test_every_guide_begins_with_an_example():
    guides = {page.stem for page in (ROOT / "docs/guide").glob("*.md")}
    assert guides == {page.stem for page in PAGES if page.parent.name == "guide"}
