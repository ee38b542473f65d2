"""Measured ceilings: what they change of a device, the file, where it is looked for."""

import dataclasses
import json

import pytest

from pbjax.device import Device, find_device
from pbjax.errors import DeviceError, FileError, InputError
from pbjax.planning.ceilings import Ceilings, calibrated, user_folder
from tests.fakes import provenance

HERE = provenance(
    device_kind="NVIDIA H100 80GB HBM3",
    driver="1",
    commit="",
    date="2026-11-29T00:00:00",
    command="pbjax calibrate",
)
FOUND = Ceilings(
    provenance=HERE,
    tensor_flops_per_s={"bfloat16": 989e12 / 2},
    attention_flops_per_s={64: 300e12, 128: 500e12},
    cuda_flops_per_s=50e12,
    functions_per_s={"exp": 3e12},
    memory_bytes_per_s=3e12,
    weight_bytes_per_s=2.5e12,
    launch_s=2e-6,
)
H100 = find_device(HERE.device_kind)


def test_ceilings_take_the_place_of_peaks():
    device = FOUND.applied_to(H100)
    assert isinstance(device, Device)
    assert device.tensor_flops_per_s["bfloat16"] == 989e12 / 2
    assert device.memory_bytes_per_s == 3e12
    assert device.launch_s == 2e-6
    assert "measured" in device.source
    assert device.memory_bytes == H100.memory_bytes


def test_a_dtype_that_was_not_measured_keeps_its_share_of_the_peak():
    assert FOUND.applied_to(H100).tensor_flops_per_s["int8"] == pytest.approx(1979e12 / 2)


def test_ceilings_of_another_device_are_refused():
    with pytest.raises(DeviceError, match="H200"):
        FOUND.applied_to(find_device("NVIDIA H200"))


@pytest.mark.parametrize(
    "change",
    [
        {"tensor_flops_per_s": {}},
        {"launch_s": 0.0},
        {"memory_bytes_per_s": -1.0},
        {"functions_per_s": {"exp": float("nan")}},
    ],
)
def test_a_rate_that_is_none_is_refused(change):
    with pytest.raises(InputError, match="measure again"):
        dataclasses.replace(FOUND, **change)


def test_a_file_brings_back_what_was_saved(tmp_path):
    path = tmp_path / "folder" / "ceilings.json"
    FOUND.save(path)
    assert Ceilings.load(path) == FOUND


def test_a_file_with_an_unknown_field_is_refused(tmp_path):
    path = tmp_path / "ceilings.json"
    FOUND.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"more": 1}))
    with pytest.raises(FileError, match="more"):
        Ceilings.load(path)


def test_calibrated_finds_what_this_machine_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibrated(H100) == H100
    FOUND.save(user_folder() / H100.slug / "ceilings.json")
    assert calibrated(H100) == FOUND.applied_to(H100)
