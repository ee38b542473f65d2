import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models.keymap import abstract_parameters, count_parameters
from models.llama.checkpoint import key_map
from models.numeric import TOLERANCE
from models.parameters import fingerprint
from tests.decoders import (
    DATA,
    call,
    changed,
    errors,
    fields_of,
    inputs,
    load,
    make,
    reference,
    tensors_of,
)

PRESETS = {
    "llama3_8b": (models.LlamaConfig.llama3_8b(), 8_030_261_248),
    "llama3_70b": (models.LlamaConfig.llama3_70b(), 70_553_706_496),
    "llama32_1b": (models.LlamaConfig.llama32_1b(), 1_235_814_400),
    "llama32_3b": (models.LlamaConfig.llama32_3b(), 3_212_749_824),
}


def parse(**change):
    return models.LlamaConfig.from_hugging_face(fields_of("llama", **change))


# Faults that the fixture must show


def interleaved(kernel):
    """The columns of each head in the order of Meta's own files."""
    heads = kernel.reshape(32, -1, 2, 8)
    return heads.swapaxes(2, 3).reshape(kernel.shape)


def test_interleaved_rotary_layout_is_noticed():
    paths = [f"layers.{i}.attention.{name}.kernel" for i in range(2) for name in ("query", "key")]
    wrong = changed("llama", **dict.fromkeys(paths, interleaved))
    assert errors("llama", wrong)["logits"] > 0.1


@pytest.mark.parametrize(
    "path",
    ["layers.0.attention.key.kernel", "layers.1.attention.value.kernel"],
)
def test_transposed_square_matrix_is_noticed(path):
    assert errors("llama", changed("llama", **{path: jnp.transpose}))["logits"] > 0.1


def test_heads_that_read_another_group_are_noticed():
    def wrong(kernel):
        return kernel.reshape(32, 2, 2, 16).swapaxes(1, 2).reshape(32, 64)

    path = "layers.0.attention.query.kernel"
    assert errors("llama", changed("llama", **{path: wrong}))["logits"] > 0.1


def test_ignored_rope_scaling_is_noticed():
    config = dataclasses.replace(load("llama").config, rope_factor=1.0)
    assert errors("llama", changed("llama", config))["logits"] > 0.1


def test_wrong_epsilon_is_noticed():
    config = dataclasses.replace(load("llama").config, norm_eps=1e-6)
    assert errors("llama", changed("llama", config))["logits"] > 5 * TOLERANCE


def test_ignored_positions_are_noticed():
    counted = np.tile(np.arange(12, dtype=np.int32), (2, 1))
    given = reference("llama").inputs | {"position_ids": counted}
    difference = np.abs(call(load("llama"), **given).logits - reference("llama").outputs["logits"])
    assert difference[0].max() > 0.1
    assert difference[1, 5:].max() > 0.1


# Positions


def test_only_differences_of_positions_matter():
    given = inputs("llama")
    one, two = (
        call(load("llama"), **(given | {"position_ids": given["position_ids"] + offset})).logits
        for offset in (np.int32(0), np.int32(17))
    )
    assert np.abs(one - two)[0].max() <= TOLERANCE * np.std(one)


def test_too_long_sequence_is_refused():
    with pytest.raises(models.InputError, match=r"length is 129; 1 to 128 is possible; truncate"):
        call(load("llama"), input_ids=np.ones((1, 129), np.int32))


# Full sizes


@pytest.mark.parametrize("preset", PRESETS)
def test_full_size_model_has_the_known_number_of_parameters(preset):
    config, total = PRESETS[preset]
    shapes = abstract_parameters(
        nnx.eval_shape(lambda: models.LlamaModel(config, rngs=nnx.Rngs(0)))
    )
    assert count_parameters(shapes) == total
    assert {leaf.path for leaf in key_map(config)} == set(shapes)


def test_full_size_model_traces_at_full_length():
    config = models.LlamaConfig.llama3_8b()
    model = nnx.eval_shape(lambda: models.LlamaModel(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    ids = jax.ShapeDtypeStruct((2, 8192), jnp.int32)
    output = jax.eval_shape(lambda s, i: nnx.merge(graphdef, s)(i, i, i), state, ids)
    assert output.last_hidden_state.shape == (2, 8192, 4096)
    assert output.logits.shape == (2, 8192, 128256)
    assert output.logits.dtype == jnp.bfloat16


@pytest.mark.parametrize("size", ["8b", "70b"])
def test_presets_of_llama_31_differ_only_in_positions(size):
    plain, scaled = (getattr(models.LlamaConfig, f"llama{v}_{size}")() for v in ("3", "31"))
    assert (scaled.rope_factor, scaled.max_seq_len) == (8.0, 131072)
    assert dataclasses.replace(scaled, rope_factor=1.0, max_seq_len=8192) == plain


# Files and config.json


def test_converted_model_is_the_same(tmp_path):
    expected = DATA / "llama" / "reference.npz"
    models.convert(DATA / "llama", tmp_path / "m", reference=expected, report=str)
    model = models.load(tmp_path / "m", verify=True)
    assert model.config == load("llama").config
    assert fingerprint(model) == fingerprint(load("llama"))


def test_report_of_the_good_fixture():
    lines = []
    models.load(DATA / "llama", report=lines.append)
    total = sum(tensor.size for tensor in tensors_of("llama").values())
    assert lines == [
        "config   llama, LlamaForCausalLM: 2 layers x 32, vocabulary 97, rope factor 8",
        "keys     21 read, 0 missing, 0 unexpected, 0 dropped, 0 tied",
        f"params   {total:,}, expected {total:,}",
    ]


def test_rotary_frequencies_of_old_files_are_dropped(tmp_path):
    tensors = tensors_of("llama")
    for layer in range(2):
        key = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
        tensors[key] = np.ones(8, np.float32)
    lines = []
    model = models.load(make(tmp_path / "m", "llama", tensors), report=lines.append)
    assert lines[1].endswith("2 dropped (rotary frequencies 2), 0 tied")
    assert fingerprint(model) == fingerprint(load("llama"))


@pytest.mark.parametrize("value", [False, ...])
def test_head_of_a_base_class_is_unexpected(tmp_path, value):
    folder = make(tmp_path / "m", "llama", architectures=["LlamaModel"], tie_word_embeddings=value)
    with pytest.raises(models.KeyMismatchError, match=r"unexpected  lm_head\.weight"):
        models.load(folder)


def test_original_files_alone_are_refused(tmp_path):
    folder = make(tmp_path / "m", "llama")
    (folder / "model.safetensors").rename(folder / "consolidated.00.pth")
    with pytest.raises(models.CheckpointError, match=r"weights only as consolidated\.00\.pth"):
        models.load(folder)


def test_fields_of_version_4_give_the_preset():
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0",
        "use_cache": True,
        "vocab_size": 128256,
    }
    assert models.LlamaConfig.from_hugging_face(fields) == models.LlamaConfig.llama31_8b()


def test_rope_parameters_of_version_5_give_the_same_configuration():
    fields = fields_of("llama")
    parameters = fields["rope_scaling"] | {"rope_theta": fields["rope_theta"]}
    assert parse(rope_parameters=parameters, rope_scaling=..., rope_theta=...) == parse()


def test_several_stop_tokens_are_no_concern_of_the_model():
    assert parse(eos_token_id=[2, 5]) == parse()


def test_absent_tie_means_untied():
    assert not parse(tie_word_embeddings=...).tie_embeddings


@pytest.mark.parametrize("value", [None, ...])
def test_absent_kv_heads_are_those_of_the_queries(value):
    assert parse(num_key_value_heads=value).num_kv_heads == 4


@pytest.mark.parametrize("value", [None, ...])
def test_absent_head_size_is_the_share_of_the_width(value):
    assert parse(head_dim=value).head_dim == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("partial_rotary_factor", 0.5),
        ("num_key_value_heads", 3),
        ("head_dim", 0),
        ("pruned_heads", {"0": [1]}),
    ],
)
def test_unsupported_value_is_refused_by_name(field, value):
    with pytest.raises(models.ConfigError) as caught:
        parse(**{field: value})
    assert f"config.json: {field} is {value!r}" in str(caught.value)


def test_heads_that_do_not_divide_the_width_need_a_head_size():
    with pytest.raises(models.ConfigError, match="num_attention_heads is 6; without head_dim"):
        parse(num_attention_heads=6, head_dim=None)
    assert parse(num_attention_heads=6).head_dim == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_kv_heads": 3}, "num_heads is 32 with 3 kv heads"),
        ({"head_dim": 127}, "head_dim is 127"),
        ({"rope_low": 4.0}, "rope_low is 4.0 with rope_high 4.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(models.ConfigError, match=message):
        dataclasses.replace(models.LlamaConfig.llama3_8b(), **change)
