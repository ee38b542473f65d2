import gc
import json
import logging
import resource
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import models
import models.conversion
from models.parameters import fingerprint, parameters_of
from tests import checkpoints
from tests.checkpoints import (
    GOOD,
    QUERY,
    REFERENCE,
    copy_good,
    quiet,
)


def values(model):
    return {p.path: np.asarray(p.value) for p in parameters_of(model)}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    target = tmp_path_factory.mktemp("converted") / "bert"
    lines = []
    report = models.convert(GOOD, target, reference=REFERENCE, report=lines.append)
    return target, report, lines


@pytest.fixture
def copied(converted, tmp_path):
    """A converted folder that a test may damage."""
    return shutil.copytree(converted[0], tmp_path / "bert")


def rewrite(folder, change):
    fields = json.loads((folder / "config.json").read_text())
    change(fields)
    (folder / "config.json").write_text(json.dumps(fields))


def refused(folder, kind=models.CheckpointError, **arguments):
    message = checkpoints.refused(folder, kind, **arguments)
    assert "\n" not in message
    return message


# Round trip


def test_converted_parameters_are_the_same_bits(converted):
    expected, found = values(models.load(GOOD)), values(models.load(converted[0]))
    assert expected.keys() == found.keys()
    for path, value in expected.items():
        assert value.tobytes() == found[path].tobytes(), path


def test_converted_configuration_is_the_same(converted):
    assert models.load(converted[0]).config == models.load(GOOD).config


def test_converted_model_without_pooler_stays_without(tmp_path):
    def drop(tensors):
        del tensors["pooler.dense.weight"], tensors["pooler.dense.bias"]

    models.convert(copy_good(tmp_path / "m", drop), tmp_path / "out", report=quiet)
    assert models.load(tmp_path / "out").pooler is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_loading_in_another_dtype_equals_rounding(converted, dtype):
    expected, found = values(models.load(GOOD)), values(models.load(converted[0], dtype))
    for path, value in expected.items():
        assert value.astype(jnp.dtype(dtype)).tobytes() == found[path].tobytes(), path


def test_converting_to_another_dtype_equals_rounding(tmp_path):
    report = models.convert(GOOD, tmp_path / "out", "bfloat16", report=quiet)
    assert report.dtype == "bfloat16"
    model = models.load(tmp_path / "out")
    assert fingerprint(model) == fingerprint(models.load(GOOD, "bfloat16")) == report.fingerprint


def test_verified_loading_repeats_the_checks(converted):
    assert fingerprint(models.load(converted[0], verify=True)) == converted[1].fingerprint


def test_verified_loading_in_another_dtype(converted):
    model = models.load(converted[0], "bfloat16", verify=True)
    assert fingerprint(model) == fingerprint(models.load(GOOD, "bfloat16"))


def test_tokenizer_is_copied(tmp_path):
    import tokenizers

    source = copy_good(tmp_path / "m")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.save(str(source / "tokenizer.json"))
    models.convert(source, tmp_path / "out", report=quiet)
    assert models.load_tokenizer(tmp_path / "out").encode("a").ids == [0]


# Report


def test_report_has_the_four_lines_and_what_was_written(converted):
    _, report, lines = converted
    kinds = [line.split()[0] for line in lines]
    assert kinds == ["config", "keys", "params", "numeric", "written", "warning"]  # no tokenizer
    assert lines == report.lines()
    assert "x std, reference reference.npz (transformers 4.57.1)" in lines[3]


def test_report_holds_the_figures(converted):
    target, report, _ = converted
    size = sum(f.stat().st_size for f in target.rglob("*") if f.is_file())
    assert report.written_bytes == size
    assert report.read_bytes == 4 * report.keys.num_parameters
    assert report.seconds > 0
    assert set(report.numeric.errors) == {
        "hidden_embedding",
        "hidden_block_0",
        "last_hidden_state",
        "pooler_output",
    }


def test_report_is_plain_data(converted):
    plain = json.loads(json.dumps(converted[1].as_dict()))
    assert plain["keys"]["num_read"] == 39
    assert plain["target"] == str(converted[0])


def test_report_with_dropped_tensors_is_plain_data(tmp_path):
    def add_old_buffer(tensors):
        tensors["embeddings.position_ids"] = np.arange(32, dtype=np.int64)[None]

    folder = copy_good(tmp_path / "old", add_old_buffer)
    report = models.convert(folder, tmp_path / "out", report=quiet)
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["keys"]["dropped"] == {"position_ids": 1}


def test_report_without_reference_says_so(tmp_path):
    lines = []
    models.convert(GOOD, tmp_path / "out", report=lines.append)
    expected = fingerprint(models.load(GOOD))
    assert lines[3].startswith("numeric  unchecked")
    assert lines[3].endswith(expected)


def test_reference_is_compared_before_rounding(tmp_path):
    report = models.convert(GOOD, tmp_path / "out", "bfloat16", reference=REFERENCE, report=quiet)
    assert max(report.numeric.errors.values()) <= 2e-5


def test_progress_ends_at_its_total(tmp_path):
    steps = []
    models.convert(GOOD, tmp_path / "out", report=quiet, progress=lambda *step: steps.append(step))
    assert steps[0][0] == 0
    assert steps[-1][0] == steps[-1][1]
    assert steps == sorted(steps)
    assert len({total for _, total in steps}) == 1


# Nothing is left behind, nothing overwritten


def test_existing_target_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(models.CheckpointError, match="exists already; nothing is overwritten"):
        models.convert(GOOD, tmp_path / "out", report=quiet)
    assert (tmp_path / "out" / "mine").read_text() == "kept"


def test_empty_existing_target_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(models.CheckpointError, match="exists already"):
        models.convert(GOOD, tmp_path / "out", report=quiet)


def test_absent_parent_is_refused(tmp_path):
    with pytest.raises(models.CheckpointError, match="its parent is no folder"):
        models.convert(GOOD, tmp_path / "a" / "out", report=quiet)


def test_converted_folder_is_not_converted_again(converted, tmp_path):
    with pytest.raises(models.CheckpointError, match="the folder is converted already"):
        models.convert(converted[0], tmp_path / "out", report=quiet)


def test_bad_keys_leave_nothing(tmp_path):
    source = copy_good(tmp_path / "m", lambda tensors: tensors.pop(QUERY))
    with pytest.raises(models.KeyMismatchError):
        models.convert(source, tmp_path / "out", report=quiet)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (OSError("disk full"), models.CheckpointError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (RuntimeError("a bug"), RuntimeError),
    ],
    ids=["disk", "interrupt", "bug"],
)
def test_failure_while_writing_leaves_nothing(tmp_path, monkeypatch, fault, seen):
    write = models.conversion.write

    def fail(folder, manifest, module):
        write(folder, manifest, module)
        raise fault

    monkeypatch.setattr(models.conversion, "write", fail)
    with pytest.raises(seen):
        models.convert(GOOD, tmp_path / "out", report=quiet)
    assert list(tmp_path.iterdir()) == []


def test_target_that_appears_meanwhile_is_left_alone(tmp_path, monkeypatch):
    write = models.conversion.write

    def race(folder, manifest, module):
        write(folder, manifest, module)
        (tmp_path / "out").mkdir()

    monkeypatch.setattr(models.conversion, "write", race)
    with pytest.raises(models.CheckpointError, match="exists already"):
        models.convert(GOOD, tmp_path / "out", report=quiet)
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    assert list((tmp_path / "out").iterdir()) == []


# Damaged folders of our own

# Orbax leaves its other reads unawaited when one of them fails.
damaged = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.update(format="other"), "format: "),
        (lambda f: f.update(format_version=2), "format_version: "),
        (lambda f: f.update(extra=1), "unknown fields extra"),
        (lambda f: f.pop("fingerprint"), "fingerprint: "),
        (lambda f: f.update(num_parameters="many"), "num_parameters: "),
        (lambda f: f.update(model_type="t5"), "model_type is 't5'"),
        (lambda f: f["config"].pop("norm_eps"), "norm_eps: "),
        (lambda f: f["config"].update(num_layers="2"), "num_layers: "),
        (lambda f: f["config"].update(num_layers=0), "num_layers is 0"),
        (lambda f: f["config"].update(activation="relu"), "activation: "),
        (lambda f: f["config"].update(dropout=0.1), "unknown fields dropout"),
    ],
)
def test_damaged_manifest_is_refused(copied, change, message):
    rewrite(copied, change)
    assert message in refused(copied, models.ConfigError)


def test_unsupported_stored_dtype_is_refused(copied):
    rewrite(copied, lambda fields: fields.update(dtype="int8"))
    assert "dtype is int8" in refused(copied)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 98}, "embeddings.word.embedding is (97, 32), not (98, 32)"),
        ({"num_layers": 1}, "layers.1.mlp.up.bias is unexpected"),
        ({"num_layers": 3}, "layers.2.mlp.up.bias is missing"),
        ({"pooler": False}, "pooler.bias is unexpected, pooler.kernel is unexpected"),
    ],
    ids=["vocabulary", "fewer layers", "more layers", "pooler"],
)
def test_configuration_of_another_model_is_refused(copied, change, message):
    rewrite(copied, lambda fields: fields["config"].update(change))
    assert message in refused(copied, models.KeyMismatchError)


def test_absent_parameters_are_refused(copied):
    shutil.rmtree(copied / "parameters")
    assert "parameters: not readable" in refused(copied)


@damaged
def test_truncated_parameters_are_refused(copied):
    file = max((copied / "parameters").rglob("*"), key=lambda f: f.stat().st_size)
    file.write_bytes(file.read_bytes()[:1000])
    assert "parameters: not readable" in refused(copied)
    gc.collect()


@damaged
def test_flipped_bit_is_noticed(copied):
    file = max((copied / "parameters").rglob("*"), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(models.CheckpointError, match=r"not readable|fingerprint"):
        models.load(copied, verify=True)
    gc.collect()


def test_other_parameters_fail_verification(copied):
    rewrite(copied, lambda fields: fields.update(fingerprint="sha256:0"))
    assert "config.json says sha256:0" in refused(copied, models.NumericError, verify=True)
    assert fingerprint(models.load(copied)) == fingerprint(models.load(GOOD))


def test_other_outputs_fail_verification(copied):
    def shift(fields):
        fields["outputs"]["pooler_output"]["sample"][3] += 0.01

    rewrite(copied, shift)
    message = refused(copied, models.NumericError, verify=True)
    assert "pooler_output is off by 1.0e-02" in message


def test_stored_values_beyond_the_dtype_are_refused(tmp_path):
    def enlarge(tensors):
        tensors[QUERY][0, 0] = 1e6

    models.convert(copy_good(tmp_path / "m", enlarge), tmp_path / "out", report=quiet)
    assert "values beyond float16" in refused(tmp_path / "out", dtype="float16")


def test_report_of_our_folder_names_model_and_fingerprint(converted):
    lines = []
    models.load(converted[0], report=lines.append)
    assert lines[0] == "config   bert, BertModel: 2 layers x 32, vocabulary 97"
    report = converted[1]
    expected = f"params   {report.keys.num_expected:,}, float32, {report.fingerprint}"
    assert lines[1] == expected


# A full disk


def not_written(target, kind=models.CheckpointError):
    with pytest.raises(kind) as caught:
        models.convert(GOOD, target, report=quiet)
    assert list(target.parent.iterdir()) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_disk_without_room_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(models.conversion, "read_module", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1))
    assert not_written(tmp_path / "m") == (
        f"{tmp_path / 'm'}: 1 bytes of its disk are free; {87552 + 2**20:,} are needed; make"
        " room or choose another folder"
    )


def test_limit_of_a_file_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(models.conversion, "read_module", None)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1000, -1))
    assert "a file may have 1,000 bytes (ulimit -f); 1," in not_written(tmp_path / "m")


def test_disk_that_fills_up_meanwhile_is_one_line(tmp_path, monkeypatch, caplog):
    def full(_, place, __):
        place.mkdir()
        (place / "half").write_text("x")
        text = f"RESOURCE_EXHAUSTED: Error writing \"{place}\"\n at [os_error_code='28']"
        logging.getLogger("absl").error("thread: %s", text)
        raise ValueError(text)

    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointer.save", full)
    assert not_written(tmp_path / "m") == (
        f"{tmp_path / 'm'}: cannot be written (No space left on device); a writable place with"
        " room is needed; free the disk or choose another folder"
    )
    assert not caplog.records


def test_other_failure_of_the_writer_is_one_line(tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("what\nnobody\nforesaw")

    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointer.save", fails)
    assert "cannot be written (what nobody foresaw); a" in not_written(tmp_path / "m")
