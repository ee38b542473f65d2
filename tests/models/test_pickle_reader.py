import builtins
import json
import os
import pickle
import pickletools
import subprocess
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models
from models.pickle_reader import read_state_dict
from models.stored_tensors import map_tensor
from models.torch_file import read_torch_headers
from tests.torch_files import Raw, View, dump, save, write

DATA = Path(__file__).parents[1] / "data"
STATE = DATA / "torch" / "state.bin"
NAMES = json.loads((DATA / "bert" / "names.json").read_text())
FLOATS = ("F32", "F16", "BF16")
ONES = np.ones((2, 3), np.float32)


def tensors_of(path):
    headers = [h for h in read_torch_headers(path) if h.dtype in FLOATS]
    return {header.key: map_tensor(header) for header in headers}


def refused(path):
    """The message with which a file is refused, in one line."""
    with pytest.raises(models.CheckpointError) as caught:
        read_torch_headers(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


# Files that PyTorch wrote


def test_tensors_of_a_state_dict_are_exact():
    expected = dict(np.load(DATA / "torch" / "expected.npz"))
    found = tensors_of(STATE)
    assert set(found) == set(expected)
    for name, value in found.items():
        np.testing.assert_array_equal(value.astype(np.float32), expected[name], err_msg=name)


def test_headers_of_a_state_dict():
    found = {h.key: (h.dtype, h.shape) for h in read_torch_headers(STATE)}
    assert found["view"] == ("F32", (2, 6))
    assert found["bf16"] == ("BF16", (6, 4))
    assert found["f16"] == ("F16", (6, 4))
    assert found["i64"] == ("I64", (5,))
    assert found["mask"] == ("BOOL", (3, 3))
    assert found["parameter"] == ("F32", (2, 4))
    assert found["scalar"] == ("F32", ())
    assert found["empty"] == ("F32", (0, 3))
    assert found["num_batches_tracked"] == ("I64", ())
    assert found["running_mean"] == ("F32", (4,))


def test_bfloat16_stays_bfloat16():
    assert tensors_of(STATE)["bf16"].dtype == ml_dtypes.bfloat16


def test_pickled_module_is_refused():
    message = refused(DATA / "torch" / "module.bin")
    assert "its pickle asks for torch.nn.modules.linear.Linear; only tensors" in message


def test_format_before_zip_archives_is_refused_by_name():
    message = refused(DATA / "torch" / "legacy.bin")
    assert "legacy.bin: a bare pickle, the format of PyTorch before 1.6; only its zip" in message
    assert "weights_only=True" in message


# Programs that ask for more than tensors


def payload(function, *arguments):
    return pickle.dumps(Raw(function, arguments), protocol=4)


def by_opcodes(module, name, arguments=b"(", end=b"tR."):
    """A program that asks for a name by STACK_GLOBAL and calls it."""
    texts = b"".join(b"\x8c" + bytes([len(t)]) + t for t in (module.encode(), name.encode()))
    return b"\x80\x04" + texts + b"\x93" + arguments + end


@pytest.mark.parametrize(
    ("program", "asked"),
    [
        (payload(os.system, "touch PLACE"), "posix.system"),
        (payload(builtins.eval, "open('PLACE', 'w')"), "builtins.eval"),
        (payload(builtins.exec, "open('PLACE', 'w')"), "builtins.exec"),
        (payload(open, "PLACE", "w"), "_io.open"),
        (payload(getattr, {}, "__class__"), "builtins.getattr"),
        (payload(subprocess.run, ("touch", "PLACE")), "subprocess.run"),
        (b"cos\nsystem\n(S'touch PLACE'\ntR.", "os.system"),
        (b"(S'touch PLACE'\nios\nsystem\n.", "opcode STRING"),
        (b"(ios\nsystem\n.", "os.system"),
        (b"\x80\x02(cos\nsystem\nX\x0b\x00\x00\x00touch PLACEo.", "os.system"),
        (by_opcodes("os", "system"), "os.system"),
        # Names that lead from what is allowed to what is not.
        (by_opcodes("collections", "OrderedDict.__init__"), "collections.OrderedDict.__init__"),
        (by_opcodes("torch._utils", "_rebuild_tensor_v2.x"), "torch._utils._rebuild_tensor_v2.x"),
        (by_opcodes("torch", "FloatStorage.__class__"), "torch.FloatStorage.__class__"),
        (by_opcodes("torch", "load"), "torch.load"),
        (by_opcodes("torch.hub", "load"), "torch.hub.load"),
        (by_opcodes("collections", "namedtuple"), "collections.namedtuple"),
        (by_opcodes("models.pickle_reader", "_tensor"), "models.pickle_reader._tensor"),
        (by_opcodes("numpy", "load"), "numpy.load"),
        (by_opcodes("builtins", "__import__"), "builtins.__import__"),
        # What opcodes alone can do.
        (b"\x80\x02\x82\x01.", "opcode EXT1"),
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "opcode NEWOBJ"),
        (b"\x80\x02ccollections\nOrderedDict\n}X\x01\x00\x00\x00aK\x01sb.", "a state for"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "a call of torch.FloatStorage"),
        (b"\x80\x02X\x01\x00\x00\x00a)R.", "a call of str"),
        (b"\x80\x02]}X\x01\x00\x00\x00aK\x01sb.", "a state for list"),
        (b"\x80\x02Pos.system\n.", "opcode PERSID"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
def test_program_that_asks_for_more_is_refused_by_name(tmp_path, monkeypatch, program, asked):
    write(tmp_path / "m.bin", program, {})
    monkeypatch.chdir(tmp_path)
    message = refused(tmp_path / "m.bin")
    assert f"its pickle asks for {asked}" in message
    assert "only tensors are loaded, and nothing was run" in message
    assert not (tmp_path / "PLACE").exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_payload_beside_tensors_is_refused(tmp_path, monkeypatch, protocol):
    value = {"weight": ONES, "extra": Raw(os.system, ("touch run",))}
    save(tmp_path / "m.bin", value, protocol=protocol)
    monkeypatch.chdir(tmp_path)
    assert "its pickle asks for posix.system" in refused(tmp_path / "m.bin")
    assert not (tmp_path / "run").exists()


def test_payload_after_the_end_is_not_read(tmp_path, monkeypatch):
    program, storages = dump({"weight": ONES})
    write(tmp_path / "m.bin", program + payload(os.system, "touch run"), storages)
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(tensors_of(tmp_path / "m.bin")["weight"], ONES)
    assert not (tmp_path / "run").exists()


def test_opcodes_that_are_carried_out_are_those_of_a_state_dict():
    with zipfile.ZipFile(STATE) as archive:
        program = archive.read("state/data.pkl")
    names = {opcode.name for opcode, _, _ in pickletools.genops(program)}
    assert {"GLOBAL", "REDUCE", "BINPERSID", "BUILD", "SETITEMS"} <= names
    for code in pickletools.opcodes:
        if code.name in ("NEWOBJ", "NEWOBJ_EX", "OBJ", "EXT2", "EXT4", "DUP", "POP", "DICT"):
            with pytest.raises(models.CheckpointError):
                read_state_dict(b"\x80\x02" + code.code.encode("latin-1") + b"\x00" * 8, "m")


def test_name_with_an_escape_that_is_none_is_refused():
    with pytest.raises(models.CheckpointError, match=r"not readable.*invalid escape"):
        read_state_dict(b"\x80\x02ctor\\ch\n_utils\n.", "m")


@settings(max_examples=300)
@given(st.data())
def test_damaged_program_is_read_or_refused_and_nothing_else(data):
    with zipfile.ZipFile(STATE) as archive:
        program = bytearray(archive.read("state/data.pkl"))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(program) - 1))
        program[place] = data.draw(st.integers(0, 255))
    try:
        found = read_state_dict(bytes(program), "m")
    except models.CheckpointError:
        return
    for tensor in found.values():
        values = tensor.storage.num_values
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
        assert 0 in tensor.shape or tensor.offset + last < values


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_random_program_is_refused(program):
    with pytest.raises(models.CheckpointError):
        read_state_dict(program + b"N.", "m")


# What is no state dict


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"epoch": 3}, "'epoch' in its pickle is int"),
        ({"model": {"weight": View(ONES)}}, "'model' in its pickle is dict"),
        ([View(ONES)], "its pickle holds list"),
        (View(ONES), "its pickle holds StoredTensor"),
        ({3: View(ONES)}, "a key is int"),
    ],
)
def test_other_content_is_refused(tmp_path, value, found):
    save(tmp_path / "m.bin", value)
    message = refused(tmp_path / "m.bin")
    assert found in message


@pytest.mark.parametrize(
    ("view", "found"),
    [
        (View(ONES, offset=1), "ends outside of its storage of 6"),
        (View(ONES, shape=(2, 4), strides=(4, 1)), "ends outside of its storage"),
        (View(ONES, shape=(2, 3), strides=(4, 1)), "ends outside of its storage"),
        (View(ONES, shape=(2**40,), strides=(0,)), "ends outside of its storage"),
        (View(ONES, shape=(2, 3), strides=(-3, 1)), "whole numbers from 0"),
        (View(ONES, offset=-1), "whole numbers from 0"),
        (View(ONES, shape=(6,), strides=(1, 1)), "1 axes and 2 strides"),
        (View(ONES, shape=(1,) * 65, strides=(1,) * 65), "a few whole numbers"),
        (View(ONES, shape=(2.0, 3), strides=(3, 1)), "whole numbers"),
        (View(ONES, shape=(True, 3), strides=(3, 1)), "whole numbers"),
        (View(ONES, key="../0"), "a storage is called '../0', no number"),
        (View(ONES, key="७"), "no number"),
        (View(ONES, num_values=-6), "whole numbers"),
        (View(ONES, num_values=7), "storage archive/data/0 has 24 bytes, not 28"),
        (View(ONES, key="5"), "storage archive/data/5 is absent"),
    ],
)  # fmt: skip
def test_tensor_outside_of_its_storage_is_refused(tmp_path, view, found):
    save(tmp_path / "m.bin", {"weight": view})
    assert found in refused(tmp_path / "m.bin")


# Damaged archives


def test_every_truncation_is_refused(tmp_path):
    whole = STATE.read_bytes()
    for kept in range(0, len(whole), 97):
        (tmp_path / "m.bin").write_bytes(whole[:kept])
        message = refused(tmp_path / "m.bin")
        assert "not readable as a PyTorch file" in message
        assert "fetch it again" in message


def test_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    (tmp_path / "m.bin").write_bytes(STATE.read_bytes())
    headers = [h for h in read_torch_headers(tmp_path / "m.bin") if h.key == "f32"]
    (tmp_path / "m.bin").write_bytes(STATE.read_bytes()[:1300])
    with pytest.raises(models.CheckpointError, match="f32 cannot be read any more"):
        map_tensor(headers[0])


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"compression": zipfile.ZIP_DEFLATED}, "is compressed or encrypted"),
        ({"order": b"big"}, "byte order is not little-endian"),
        ({"more": ["other/data.pkl"]}, "no archive with one data.pkl"),
    ],
)
def test_archive_of_another_kind_is_refused(tmp_path, changes, found):
    save(tmp_path / "m.bin", {"weight": np.ones((40, 40), np.float32)}, **changes)
    assert found in refused(tmp_path / "m.bin")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_name_twice_in_an_archive_is_refused(tmp_path):
    save(tmp_path / "m.bin", {"weight": ONES}, more=["archive/data/0"])
    assert "no name twice" in refused(tmp_path / "m.bin")


def test_entry_outside_of_the_file_is_refused(tmp_path):
    save(tmp_path / "m.bin", {"weight": ONES})
    data = (tmp_path / "m.bin").read_bytes()
    local = data.index(b"PK\x03\x04", data.index(b"archive/data/0") - 40)
    (tmp_path / "m.bin").write_bytes(data[: local + 26] + b"\xff\xff" + data[local + 28 :])
    assert "archive/data/0 ends after the file" in refused(tmp_path / "m.bin")
