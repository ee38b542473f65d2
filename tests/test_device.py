"""Device figures: look-up by kind, ridge points, refusals."""

import types
from dataclasses import replace

import pytest

from pbjax.device import Device, ResourceClass, check_platforms, devices, find_device
from pbjax.errors import DeviceError, InputError, InputTypeError


@pytest.mark.parametrize(
    ("kind", "ridge"),
    [
        ("NVIDIA H200", 206),
        ("NVIDIA H100 80GB HBM3", 295),
        ("NVIDIA A100-SXM4-80GB", 153),
        ("NVIDIA L40S", 419),
        ("NVIDIA GeForce RTX 4090", 164),
        ("NVIDIA GeForce RTX 5090", 117),
        ("NVIDIA B200", 292),
    ],
)
def test_ridge_point_follows_the_datasheet(kind, ridge):
    assert round(find_device(kind).ridge_point("bfloat16")) == ridge


def test_h200_has_its_datasheet_figures():
    device = find_device("NVIDIA H200")
    assert (device.num_sms, device.memory_bytes) == (132, 141_000_000_000)
    assert device.memory_bytes_per_s == 4.8e12
    assert device.cuda_flops_per_s == 67e12
    assert device.tensor_flops_per_s["int8"] == 2 * device.tensor_flops_per_s["bfloat16"] + 1e12


def test_slug_finds_the_same_device_as_the_kind():
    assert find_device("nvidia_h200") == find_device("NVIDIA H200")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("nvidia-h200", "NVIDIA H200"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("a100-sxm4-80gb", "NVIDIA A100-SXM4-80GB"),
        ("rtx 4090", "NVIDIA GeForce RTX 4090"),
        ("rtx_5090", "NVIDIA GeForce RTX 5090"),
        ("nvidia-b200", "NVIDIA B200"),
        ("L40S", "NVIDIA L40S"),
    ],
)
def test_words_of_a_kind_are_enough(words, kind):
    assert find_device(words).kind == kind


@pytest.mark.parametrize("kind", ["NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA L40", "H20", ""])
def test_a_kind_is_not_taken_for_its_neighbour(kind):
    with pytest.raises(DeviceError, match="known kinds are"):
        find_device(kind)


def test_words_of_several_kinds_name_them():
    with pytest.raises(DeviceError, match=r"several kinds.*A100-SXM4-80GB.*A100-SXM4-40GB"):
        find_device("a100")


@pytest.mark.parametrize("device", devices(), ids=lambda device: device.slug)
def test_rates_of_a_device_fit_together(device):
    rates = device.tensor_flops_per_s
    assert rates["bfloat16"] == rates["float16"] >= rates["float32"] >= rates.get("float64", 0)
    assert rates.get("int8", rates["bfloat16"]) >= rates.get("float8_e4m3fn", rates["bfloat16"])
    assert device.source
    assert (device.link_bytes_per_s is None) == (device.kind == "cpu")


def test_devices_are_hashable():
    assert hash(find_device("nvidia_h200")) == hash(find_device("NVIDIA H200"))


def test_dtype_without_tensor_cores_runs_at_the_vector_rate():
    device = find_device("NVIDIA A100-SXM4-80GB")
    assert device.contraction_flops_per_s("float8_e4m3fn") == device.cuda_flops_per_s


def test_cpu_scales_with_its_cores_and_says_that_it_is_rough():
    one, four = find_device("cpu"), find_device("cpu", num_cores=4)
    assert four.cuda_flops_per_s == 4 * one.cuda_flops_per_s
    assert four.memory_bytes_per_s == 4 * one.memory_bytes_per_s
    assert (one.num_sms, four.num_sms) == (1, 4)
    assert four.ridge_point("float32") == one.ridge_point("float32")
    assert "rough" in one.source


def test_cores_do_not_change_a_gpu():
    assert find_device("NVIDIA H200", num_cores=7) == find_device("NVIDIA H200")


def test_unknown_kind_lists_the_known_ones():
    with pytest.raises(DeviceError, match=r"'NVIDIA H900'.*'NVIDIA H200'.*'cpu'"):
        find_device("NVIDIA H900")


def test_no_cores_are_refused():
    with pytest.raises(InputError, match="num_cores is 0"):
        find_device("cpu", num_cores=0)


def test_a_device_of_the_user_needs_no_table():
    device = Device(
        kind="mine",
        slug="mine",
        tensor_flops_per_s={"bfloat16": 8.0},
        cuda_flops_per_s=2.0,
        memory_bytes_per_s=4.0,
        num_sms=1,
        memory_bytes=1,
        source="measured",
    )
    assert device.ridge_point("bfloat16") == 2.0
    assert device.ridge_point("int4") == 0.5


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"memory_bytes_per_s": 0.0}, "memory_bytes_per_s is 0"),
        ({"cuda_flops_per_s": float("nan")}, "cuda_flops_per_s is nan"),
        ({"num_sms": -1}, "num_sms is -1"),
        ({"tensor_flops_per_s": {"int8": float("inf")}}, r"tensor_flops_per_s\[int8\] is inf"),
        ({"link_bytes_per_s": -2.0}, "link_bytes_per_s is -2"),
        ({"launch_s": -1e-6}, "launch_s is -1e-06"),
    ],
)
def test_figures_that_no_device_has_are_refused_by_name(change, name):
    with pytest.raises(InputError, match=rf"Device\(kind='NVIDIA H200'\): {name};"):
        replace(find_device("h200"), **change)


def test_a_kind_that_is_no_text_is_refused():
    plain = getattr(find_device, "__wrapped__", find_device)
    with pytest.raises(InputTypeError, match=r"find_device\(kind\): a NoneType; a text"):
        plain(None)


def test_resource_classes_print_as_their_names():
    assert [f"{c}" for c in ResourceClass] == ["TENSOR", "CUDA", "MEMORY"]


# The platform that JAX is asked for


@pytest.mark.parametrize("asked", ["cuda", "gpu", "cuda,gpu"])
def test_gpu_without_its_plugin_names_the_extra(monkeypatch, asked):
    monkeypatch.setenv("JAX_PLATFORMS", asked)
    monkeypatch.setattr("pbjax.device.find_spec", lambda name: None)
    with pytest.raises(DeviceError) as caught:
        check_platforms()
    assert str(caught.value) == (
        f"JAX_PLATFORMS={asked}: JAX has no CUDA plugin; an installed platform is allowed;"
        ' pip install "pbjax[cuda]", or set JAX_PLATFORMS=cpu'
    )


@pytest.mark.parametrize("asked", ["", "cpu", "cuda,cpu", "tpu"])
def test_other_platforms_are_left_to_jax(monkeypatch, asked):
    monkeypatch.setenv("JAX_PLATFORMS", asked)
    monkeypatch.setattr("pbjax.device.find_spec", None)
    check_platforms()


def test_plugin_that_is_installed_is_enough(monkeypatch, tmp_path):
    (tmp_path / "xla_cuda13").mkdir()
    (tmp_path / "xla_cuda13" / "__init__.py").touch()
    found = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr("pbjax.device.find_spec", lambda name: found)
    check_platforms()
