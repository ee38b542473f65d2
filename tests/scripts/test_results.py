"""docs/results against profiles/, and every link, path and name in README and docs."""

import importlib
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "profiles/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = ("pbjax", "models", "pallas_kernels", "scripts", "tests")
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)
PATH = re.compile(
    r"(?<![\w/.-])(?:pbjax|models|pallas_kernels|scripts|tests|docs|profiles)/"
    r"(?:[\w/.]+\.(?:py|md)|(?:\w+/)+)"
)
NAME = re.compile(r"(?<![\w/.-])(?:pbjax|models|pallas_kernels)(?:\.[a-zA-Z_]\w*)+(?![\w/])")


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("write_results")


@pytest.fixture
def copy(tmp_path):
    shutil.copy(ROOT / "README.md", tmp_path)
    for folder in ("docs/results", "docs/guide", "profiles/nvidia_h200"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def test_pages_are_those_of_the_measured_files(results, capsys):
    assert results.check(ROOT) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", ["README.md", "docs/results/models.md", "docs/results/README.md"])
def test_a_page_that_was_edited_is_named(results, copy, capsys, page):
    path = copy / page
    path.write_text(re.sub(r"0\.36|14,\d{3}", "15,884", path.read_text()))
    assert results.check(copy) == 1
    assert capsys.readouterr().err.startswith(f"{page}: differs from profiles/")


def test_a_measured_file_that_changed_is_seen(results, copy, capsys):
    path = copy / "profiles/nvidia_h200/bench_step.json"
    path.write_text(path.read_text().replace("0.00704", "0.00804"))
    assert results.check(copy) == 1
    assert capsys.readouterr().err.startswith("docs/results/steps.md: differs")


def test_a_page_is_written_once(results, copy, capsys):
    (copy / "docs/results/gemm.md").unlink()
    results.write(copy)
    assert capsys.readouterr().out == "wrote docs/results/gemm.md\n"
    assert results.check(copy) == 0


def test_every_table_of_the_readme_is_marked(results):
    readme = (ROOT / "README.md").read_text()
    assert results.MARKED.findall(readme)
    assert len(readme.splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_paths_and_names_lead_somewhere(page):
    assert broken(page, page.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "[gone](gone.md)",
        "[no such heading](README.md#gone)",
        "`pbjax/gone.py`",
        "```\npbjax/gone/   a room\n```",
        "`scripts/bench_gone.py --out FILE`",
        "```\npython scripts/bench_gone.py\n```",
        "`pbjax.planning.gone`",
        "`pbjax.planning.search.gone(x)`",
        "`models.load_gone`",
    ],
)
def test_a_link_path_or_name_that_leads_nowhere_is_found(text):
    assert len(broken(ROOT / "README.md", text)) == 1


def test_pages_that_sources_name_exist():
    pages = re.compile(r"\bdocs/[\w/]+\.md")
    found = {
        (str(path.relative_to(ROOT)), page)
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*.py")
        for page in pages.findall(path.read_text())
        if path != Path(__file__).resolve()
    }
    assert [pair for pair in sorted(found) if not (ROOT / pair[1]).exists()] == []


def broken(page: Path, text: str) -> list[str]:
    """Links, paths and names of a text that lead nowhere."""
    code = "\n".join(CODE.findall(text))
    written = page.parent.name == "results"  # commands are those of an earlier commit
    paths = [] if written else PATH.findall(code)
    return [
        *(link for link in LINK.findall(text) if not leads(page, link)),
        *(path for path in paths if not (ROOT / path).exists()),
        *(name for name in set(NAME.findall(code)) if not resolves(name)),
    ]


def leads(page: Path, link: str) -> bool:
    """Whether a link is an address, or a file and a heading that exist."""
    if link.startswith(("https://", "http://")):
        return True
    target, _, anchor = link.partition("#")
    path = (page.parent / target).resolve() if target else page
    return path.exists() and (not anchor or anchor in anchors(path.read_text()))


def anchors(text: str) -> set[str]:
    """The headings of a page, as they are linked to."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or stands in one: read from the sources, not imported."""
    place, *rest = name.split(".")
    path = ROOT / place
    while rest and ((path / rest[0]).is_dir() or (path / f"{rest[0]}.py").exists()):
        path /= rest.pop(0)
    if not rest:
        return True
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    word = re.escape(rest[0])
    made = rf'^\s*(?:def|class|type) {word}\b|^{word}\b|^\s+"?{word}"?[,:]|import .*\b{word}\b'
    return re.search(made, source.read_text(), re.MULTILINE) is not None
