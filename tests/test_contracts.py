"""The import contracts of pyproject.toml bite: each breaks on every import that it forbids.

The walls are drawn a second time here, so that a door broken through one of them is seen.
"""

import copy
import shutil
import subprocess
import sys
from itertools import combinations, permutations, product
from pathlib import Path

import grimp
import pytest
from importlinter import api
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract

HERE = Path(__file__).parents[1]
SETTINGS = api.read_configuration(str(HERE / "pyproject.toml"))
CONTRACTS = {options["name"]: options for options in SETTINGS["contracts_options"]}
KINDS = {"layers": LayersContract, "forbidden": ForbiddenContract}

# From the highest to the lowest; those of one line do not import each other.
ROOMS = (
    "cli",
    "pipeline",
    "figures decode",
    "tuning inference",
    "roofline runtime",
    "program",
    "fusion batch_axes",
    "graph planning",
    "arguments buckets device files progress text_tables",
    "errors",
)
GENERATION = ("api", "decoding", "prompts sampling text results")
PURE = (
    "planning planning.search arguments buckets device errors files text_tables decode.interleave "
    "figures.batch_study figures.html figures.plan figures.roofline figures.timelines "
    "inference.packing runtime.device_trace roofline.batch_study roofline.depth "
    "roofline.measured_table roofline.points roofline.result roofline.tables roofline.what_if"
)


def inside(package, names):
    return [f"{package}.{name}" for name in names.split()]


def between(importers, imported):
    return list(product(importers, imported))


def upward(*layers):
    """Every import between two of these that does not lead downward."""
    sideways = [edge for siblings in layers for edge in permutations(siblings, 2)]
    steps = combinations(layers, 2)
    return sideways + [edge for above, below in steps for edge in between(below, above)]


FORBIDDEN = {
    "pbjax and models never import each other; pallas_kernels imports neither": upward(
        ["pbjax", "models"], ["pallas_kernels"]
    ),
    "rooms of pbjax import downward only": upward(*(inside("pbjax", names) for names in ROOMS)),
    "what is run does not know how a split is chosen": between(
        inside("pbjax", "graph batch_axes fusion program runtime"),
        inside("pbjax.planning", "search candidates throughput plan"),
    ),
    "inference runs models, and neither plans nor takes them apart": between(
        inside("pbjax.inference", "embedding packing generation.api generation.sampling"),
        inside("pbjax", "planning program fusion roofline tuning decode"),
    ),
    "inside pbjax.inference.generation": upward(
        *(inside("pbjax.inference.generation", names) for names in GENERATION)
    ),
    "planning and other pure modules know neither jax nor flax": between(
        inside("pbjax", PURE), ["jax", "jaxlib", "flax"]
    ),
    "flax enters pbjax at one seam": between(
        inside("pbjax", " ".join([*ROOMS, "graph.trace"])), ["flax"]
    ),
    "kernels know only jax": between(
        ["pallas_kernels", "pallas_kernels.dispatch", "pallas_kernels.gemm.api"],
        ["flax", "orbax", "typer", "rich", "pydantic"],
    ),
}
# What four absurd imports look like in the source, and the contract that each breaks.
PLANTED = {
    "pbjax.graph.trace -> pbjax.planning.search": "what is run does not know",
    "pbjax.runtime.execution -> pbjax.figures.html": "rooms of pbjax",
    "pbjax.program.stages -> pbjax.planning.candidates": "what is run does not know",
    "pbjax.inference.generation.sampling -> pbjax.roofline.what_if": "inference runs models",
}


@pytest.fixture(scope="module")
def imports():
    return grimp.build_graph(
        *SETTINGS["session_options"]["root_packages"],
        include_external_packages=True,
        cache_dir=None,
    )


def kept(name, imports):
    options = CONTRACTS[name]
    contract = KINDS[options["type"]](name, SETTINGS["session_options"], options)
    return contract.check(copy.deepcopy(imports), verbose=False).kept


def with_import(imports, importer, imported):
    assert {importer, imported} <= imports.modules
    planted = copy.deepcopy(imports)
    planted.add_import(importer=importer, imported=imported)
    return planted


def test_every_contract_has_imports_planted():
    assert FORBIDDEN.keys() == CONTRACTS.keys()


@pytest.mark.parametrize("name", FORBIDDEN)
def test_contract_breaks_on_each_import_it_forbids(name, imports):
    assert kept(name, imports)
    assert not [edge for edge in FORBIDDEN[name] if kept(name, with_import(imports, *edge))]


@pytest.mark.parametrize("package", ["pbjax", "pbjax.inference.generation"])
def test_new_module_must_be_given_its_place(package, imports):
    (name,) = (name for name in CONTRACTS if CONTRACTS[name].get("containers") == [package])
    grown = copy.deepcopy(imports)
    grown.add_module(f"{package}.annex")
    assert not kept(name, grown)


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A copy of the packages and their settings."""
    folder = tmp_path_factory.mktemp("house")
    shutil.copy(HERE / "pyproject.toml", folder)
    for package in SETTINGS["session_options"]["root_packages"]:
        shutil.copytree(HERE / package, folder / package)
    return folder


def lint(folder):
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, " ".join(done.stdout.split())


def test_check_of_the_house_as_it_is_passes(house):
    assert "\t$(BIN)/lint-imports\n" in (HERE / "Makefile").read_text()
    code, text = lint(house)
    assert code == 0, text


@pytest.mark.parametrize("planted", PLANTED)
def test_check_fails_on_an_absurd_import(planted, house):
    importer, imported = planted.split(" -> ")
    source = house / f"{importer.replace('.', '/')}.py"
    before = source.read_text()
    source.write_text(f"{before}\nimport {imported}\n")
    try:
        code, text = lint(house)
    finally:
        source.write_text(before)
    assert code == 1
    assert PLANTED[planted] in text
    assert planted in text
