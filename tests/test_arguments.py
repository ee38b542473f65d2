"""Arguments of a wrong type are refused by name, and numbers of any library are taken."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import checkpoint, companions, hf_folder
from pallas_kernels import arguments as kernel_arguments
from pallas_kernels import norm
from pallas_kernels.attention import attention
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.gemm import gemm
from pbjax import arguments, pipeline
from pbjax.errors import FileError, InputError, InputTypeError
from pbjax.inference.generation import prompts, sampling
from pbjax.inference.generation.text import check_stop_strings
from pbjax.planning.profiling import Profile
from pbjax.planning.search import search
from pbjax.roofline import report as roofline
from pbjax.tuning.request import Request

from .fakes import provenance
from .search_tables import program


def plain(function):
    """Without the check of annotations that the test run makes, which would come before ours."""
    return getattr(function, "__wrapped__", function)


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3), jnp.int32(3)], ids=repr)
def test_whole_numbers_of_any_library_are_taken(value):
    assert arguments.whole_number("f(x)", value) == 3
    assert arguments.number("f(x)", value) == 3.0
    assert type(arguments.whole_number("f(x)", value)) is int


@pytest.mark.parametrize("value", [1.5, np.float32(2.0), "3", None, True, [3], b"3"], ids=repr)
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(InputTypeError, match=rf"f\(x\): .* {type(value).__name__}; a whole"):
        arguments.whole_number("f(x)", value)


@pytest.mark.parametrize("values", [[1, 2], (np.int8(1), 2), {1, 2}, np.array([1, 2])], ids=repr)
def test_several_whole_numbers_are_taken(values):
    assert arguments.whole_numbers("f(x)", values) == [1, 2]


@pytest.mark.parametrize("values", [3, None, "12", b"12", np.int64(3), np.array(3)], ids=repr)
def test_what_is_not_several_whole_numbers_is_refused(values):
    with pytest.raises(InputTypeError, match=r"f\(x\): .*; several whole numbers"):
        arguments.whole_numbers("f(x)", values)


@pytest.mark.parametrize("value", ["0.5", None, [0.5], np.ones(2), True], ids=repr)
def test_what_is_no_number_is_refused_in_one_line(value):
    with pytest.raises(InputTypeError, match="a number is allowed") as error:
        arguments.number("f(x)", value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"], ids=str
)
def test_settings_of_sampling_are_numbers(name):
    kind, check = sampling.Sampling, plain(sampling.Sampling.__post_init__)
    settings = kind(temperature=1.0)
    object.__setattr__(settings, name, "1")
    with pytest.raises(InputTypeError, match=rf"generate\({name}\): '1'"):
        check(settings)
    object.__setattr__(settings, name, np.int64(1))
    check(settings)
    assert type(getattr(settings, name)) is (int if name == "top_k" else float)


@pytest.mark.parametrize("texts", [3, None, [3], b"a", [b"a"]], ids=repr)
def test_stop_strings_are_texts(texts):
    with pytest.raises(InputTypeError, match=r"generate\(stop_strings=.*several texts"):
        plain(check_stop_strings)(texts, None)


@pytest.mark.parametrize("rows", [None, 3, iter([[1]]), np.array(3)])
def test_prompts_have_a_length(rows):
    with pytest.raises(InputTypeError, match=r"generate\(prompts\): a .*for one prompt pass"):
        plain(prompts.read_prompts)(rows, None, None, 9)


def test_a_mask_is_rows():
    with pytest.raises(InputTypeError, match=r"generate\(attention_mask\): a int"):
        plain(prompts._strip)([np.array([1])], 3)


@pytest.mark.parametrize("folder", [None, 3, b"bert"], ids=repr)
@pytest.mark.parametrize("load", [checkpoint.load, companions.load_stop_tokens])
def test_a_folder_is_a_path(monkeypatch, load, folder):
    module = checkpoint if load is checkpoint.load else companions
    monkeypatch.setattr(module, "find_folder", plain(hf_folder.find_folder))
    with pytest.raises(models.CheckpointError, match=r"folder .*: a \w+; a path is needed"):
        plain(load)(folder)


# Kernels


@pytest.mark.parametrize("value", [1.5, "1", None, True, [1]], ids=repr)
def test_a_count_of_a_kernel_is_a_whole_number(value):
    with pytest.raises(TypeError, match=r"attention\(window\): a \w+; a whole number"):
        kernel_arguments.whole("attention", "window", value)
    assert kernel_arguments.whole("attention", "window", np.int64(3)) == 3


@pytest.mark.parametrize("value", ["1", None, True, [1.0]], ids=repr)
def test_a_factor_of_a_kernel_is_a_number(value):
    with pytest.raises(TypeError, match=r"gemm\(scale\): a \w+; a number"):
        kernel_arguments.number("gemm", "scale", value)


def test_numbers_of_a_kernel_are_known_while_tracing():
    x = jnp.ones((8, 8))
    with pytest.raises(TypeError, match=r"gemm\(scale\): a .*Tracer; .* known while tracing"):
        jax.jit(lambda scale: plain(gemm)(x, x, scale=scale))(2.0)
    assert plain(gemm)(x, x, scale=jnp.float32(2.0)).shape == (8, 8)


def test_operands_of_kernels_are_arrays():
    x, heads = jnp.ones((8, 8)), jnp.ones((1, 8, 1, 8))
    calls = {
        r"gemm\(x\): a list": lambda: plain(gemm)([1.0], x),
        r"gemm\(bias\): a list": lambda: plain(gemm)(x, x, bias=[1.0]),
        r"rms_norm\(scale\): a NoneType": lambda: plain(norm.rms_norm)(x, None, eps=0.0),
        r"attention\(lengths\): a list": lambda: plain(attention)(heads, heads, heads, lengths=[8]),
        r"decode_attention\(lengths\): a int": lambda: plain(decode_attention)(
            heads, heads, heads, 8
        ),
    }
    for message, call in calls.items():
        with pytest.raises(TypeError, match=f"{message}; an array"):
            call()


def test_a_kernel_that_is_named_is_refused_by_name_where_it_cannot_run():
    x = jnp.ones((64, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"gemm\(.*the device is 'cpu'; .*'xla'"):
        gemm(x, x, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="rms_norm"):
        norm.rms_norm(x, x[0], eps=1e-5, implementation="mosaic_gpu")
    jax.eval_shape(lambda x: gemm(x, x, implementation="mosaic_gpu"), x)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": "cpu"}, r"optimize\(device\): 'cpu' of type str; a pbjax.Device"),
        ({"plan": 5}, r"optimize\(plan\): 5 of type int; a pbjax.Plan, or its file"),
        ({"profile": b"x"}, r"optimize\(profile\): b'x' of type bytes; a pbjax.Profile"),
        ({"progress": 5}, r"optimize\(progress\): a int; a function of \(phase"),
        ({"unroll": "a"}, r"optimize\(unroll\): 'a' of type str; a whole number"),
        ({"unroll": True}, r"optimize\(unroll\): True of type bool; a whole number"),
        ({"unroll": 1.5}, r"optimize\(unroll\): 1.5 of type float; a whole number"),
        ({"state": "0"}, r"optimize\(state\): '0' of type str; a whole number"),
    ],
    ids=str,
)
def test_arguments_of_optimize_of_another_type_are_refused_by_name(monkeypatch, given, message):
    monkeypatch.setattr(Request, "of", classmethod(plain(Request.__dict__["of"].__func__)))
    with pytest.raises(InputTypeError, match=message):
        plain(pipeline.optimize)(jnp.tanh, jnp.ones((4, 3)), **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"device": 5}, r"roofline_report\(device\): 5 of type int; a pbjax.Device, or its kind"),
        ({"weights": 5}, r"roofline_report\(weights\): 5 of type int; several whole numbers"),
        ({"cache": ("a",)}, r"roofline_report\(cache\): 'a' of type str; a whole number"),
        ({"items": "a"}, r"roofline_report\(items\): 'a' of type str; a whole number"),
        ({"tokens": 1.5}, r"roofline_report\(tokens\): 1.5 of type float; a whole number"),
        ({"measure": "yes"}, r"roofline_report\(measure\): 'yes' of type str; True or False"),
        ({"turn": 5}, r"roofline_report\(turn\): 5 of type int; a context manager"),
    ],
    ids=str,
)
def test_arguments_of_a_roofline_of_another_type_are_refused_by_name(given, message):
    with pytest.raises(InputTypeError, match=message):
        plain(roofline.roofline_report)(jnp.tanh, jnp.ones((4, 3)), **{"device": "cpu"} | given)


def test_a_roofline_of_less_than_no_rows_is_refused():
    with pytest.raises(InputError, match=r"roofline_report\(items=-1\): .* 0 or more"):
        roofline.roofline_report(jnp.tanh, jnp.ones((4, 3)), device="cpu", items=-1)


def test_a_plan_that_is_corrupt_is_refused_before_the_model_is_traced(tmp_path):
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(FileError, match=r"plan\.json"):
        pipeline.optimize(
            lambda x: pytest.fail("traced"), jnp.ones((4, 3)), plan=tmp_path / "plan.json"
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"summary": 5}, r"search\(summary\): 5 of type int; a ProgramSummary is allowed"),
        ({"profile": "bert.json"}, r"search\(profile\): 'bert.json' of type str; a Profile, as of"),
        ({"batch_size": 2.0}, r"search\(batch_size\): 2.0 of type float; a whole number"),
        ({"options": {}}, r"search\(options\): \{\} of type dict; a SearchOptions is allowed"),
    ],
    ids=str,
)
def test_arguments_of_a_search_of_another_type_are_refused_by_name(given, message):
    asked = {"summary": program(2, 3), "profile": Profile(provenance=provenance())}
    with pytest.raises(InputTypeError, match=message):
        plain(search)(**{**asked, "batch_size": 4} | given)


WRONG_TYPES = """
from pbjax.planning.plan import Plan
from pbjax.planning.profiling import Profile
from pbjax.planning.timetable import Split
calls = {calls!r}
for call in calls:
    try:
        eval(call)
    except TypeError as error:
        print(type(error).__name__, error)
"""


def test_sizes_and_paths_of_another_type_are_refused_by_name():
    """In a process of its own: here annotations are checked before."""
    sizes = ("5", "'ab'", "(1.5, 2)", "('a',)", "(True, 1)")
    calls = [*(f"Split(sizes={s})" for s in sizes), "Plan.load(5)", "Profile.load(None)"]
    code = WRONG_TYPES.format(calls=calls)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *of_sizes, plan, profile = done.stdout.splitlines()
    assert [line.startswith("InputTypeError Split(sizes): ") for line in of_sizes] == [True] * 5
    assert plan.startswith("InputTypeError load(path): a int; the path of a file is allowed")
    assert profile.startswith("InputTypeError load(path): a NoneType; the path of a file is")
