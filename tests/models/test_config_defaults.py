"""A config.json may leave out what equals the default of Hugging Face's configuration class.

The defaults are those that transformers 5.24.0 writes for its classes without arguments.
"""

import json
import shutil

import pytest

import models
from models.llama.config import LlamaConfig
from tests.checkpoints import GOOD, good_tensors, make, refused

ENCODER = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
BERT = ENCODER | {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "num_hidden_layers": 12,
    "type_vocab_size": 2,
    "vocab_size": 30522,
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
}
VIT = ENCODER | {
    "hidden_act": "gelu",
    "image_size": 224,
    "layer_norm_eps": 1e-12,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "patch_size": 16,
    "pooler_act": "tanh",
    "pooler_output_size": 768,
    "qkv_bias": True,
}
GPT2 = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_layer": 12,
    "n_positions": 1024,
    "reorder_and_upcast_attn": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
    "vocab_size": 50257,
}
BLOOM = {
    "apply_residual_connection_post_layernorm": False,
    "hidden_size": 64,
    "layer_norm_epsilon": 1e-05,
    "n_head": 8,
    "n_layer": 2,
    "pretraining_tp": 1,
    "slow_but_exact": False,
    "tie_word_embeddings": True,
    "vocab_size": 250880,
}
LLAMA = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
WAV2VEC2 = ENCODER | {
    "add_adapter": False,
    "conv_bias": False,
    "conv_depthwise_kernel_size": 31,
    "conv_dim": [512] * 7,
    "conv_kernel": [10, 3, 3, 3, 3, 2, 2],
    "conv_stride": [5, 2, 2, 2, 2, 2, 2],
    "feat_extract_activation": "gelu",
    "feat_extract_norm": "group",
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-05,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embeddings_type": "relative",
    "rotary_embedding_base": 10000,
    "use_weighted_layer_sum": False,
}
PARAKEET = {
    "attention_bias": True,
    "conv_kernel_size": 9,
    "convolution_bias": True,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "max_position_embeddings": 5000,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_mel_bins": 80,
    "scale_input": True,
    "subsampling_conv_channels": 256,
    "subsampling_conv_kernel_size": 3,
    "subsampling_conv_stride": 2,
    "subsampling_factor": 8,
}
LASR = {
    "attention_bias": False,
    "conv_kernel_size": 32,
    "conv_residual_weights": [2.0, 1.0],
    "convolution_bias": False,
    "feed_forward_residual_weights": [1.5, 0.5],
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "layer_norm_eps": 1e-06,
    "num_attention_heads": 8,
    "num_hidden_layers": 17,
    "num_key_value_heads": 8,
    "num_mel_bins": 128,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "subsampling_conv_channels": 256,
    "subsampling_conv_kernel_size": 5,
    "subsampling_conv_stride": 2,
}
# For each family: its configuration, the defaults, and a class that reads all of them.
FAMILIES = {
    "bert": (models.BertConfig, BERT, "BertModel"),
    "vit": (models.ViTConfig, VIT, "ViTModel"),
    "gpt2": (models.GPT2Config, GPT2, "GPT2LMHeadModel"),
    "bloom": (models.BloomConfig, BLOOM, "BloomForCausalLM"),
    "llama": (LlamaConfig, LLAMA, "LlamaForCausalLM"),
    "wav2vec2-conformer": (models.Wav2Vec2ConformerConfig, WAV2VEC2, "Wav2Vec2ConformerModel"),
    "parakeet_encoder": (models.ParakeetConfig, PARAKEET, "ParakeetEncoder"),
    "lasr_encoder": (models.LasrConfig, LASR, "LasrEncoder"),
}
CTC = {
    "parakeet_ctc": (models.ParakeetConfig, PARAKEET, {"vocab_size": 1025, "pad_token_id": 1024}),
    "lasr_ctc": (models.LasrConfig, LASR, {"vocab_size": 512, "pad_token_id": 0}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_left_out_has_the_default_of_transformers(family):
    kind, defaults, architecture = FAMILIES[family]
    named = {"model_type": family, "architectures": [architecture]}
    whole = kind.from_hugging_face(named | defaults)
    for name in defaults:
        less = {k: v for k, v in defaults.items() if k != name}
        assert kind.from_hugging_face(named | less) == whole, name
    assert kind.from_hugging_face(named) == whole


@pytest.mark.parametrize("family", CTC)
def test_every_field_of_a_ctc_model_left_out_has_its_default(family):
    kind, encoder, head = CTC[family]
    whole = kind.from_hugging_face({"model_type": family, "encoder_config": encoder} | head)
    assert kind.from_hugging_face({"model_type": family}) == whole
    assert kind.from_hugging_face({"model_type": family, "encoder_config": {}}) == whole
    assert whole.vocab_size == head["vocab_size"]


def test_named_configurations_are_the_defaults_where_transformers_has_the_same():
    assert models.BertConfig.from_hugging_face({}) == models.BertConfig.base()
    assert models.GPT2Config.from_hugging_face({}) == models.GPT2Config.small()
    fields = {"model_type": "parakeet_ctc"}
    assert models.ParakeetConfig.from_hugging_face(fields) == models.ParakeetConfig.ctc_0_6b()
    assert (
        models.LasrConfig.from_hugging_face({"model_type": "lasr_ctc"}) == models.LasrConfig.ctc()
    )


def test_entries_of_a_wav2vec2_head_have_no_default():
    fields = {"architectures": ["Wav2Vec2ConformerForCTC"]}
    with pytest.raises(models.ConfigError, match="vocab_size is missing; it has no default; add"):
        models.Wav2Vec2ConformerConfig.from_hugging_face(fields)


def test_labels_without_names_are_counted_by_num_labels():
    fields = {"architectures": ["ViTForImageClassification"]}
    assert models.ViTConfig.from_hugging_face(fields).num_labels == 2
    assert models.ViTConfig.from_hugging_face(fields | {"num_labels": 7}).num_labels == 7


def test_rope_theta_beside_parameters_without_one_is_theirs():
    fields = {"rope_theta": 500000.0, "rope_parameters": {"rope_type": "default"}}
    assert LlamaConfig.from_hugging_face(fields).rope_theta == 500000.0


def test_default_that_does_not_fit_names_itself():
    with pytest.raises(models.ConfigError) as caught:
        models.BertConfig.from_hugging_face({"hidden_size": 32})
    assert str(caught.value) == (
        "config.json: num_attention_heads is absent, which is 12 by Hugging Face's default;"
        " it must divide hidden_size 32; correct it"
    )


# Folders: the tensors decide


def test_older_bert_without_epsilon_is_loaded(tmp_path):
    model = models.load(
        make(tmp_path / "m", layer_norm_eps=..., hidden_act=..., type_vocab_size=...)
    )
    assert model.config == models.load(GOOD).config


def test_default_that_the_tensors_contradict_is_named_with_both_sizes(tmp_path):
    message = refused(make(tmp_path / "m", vocab_size=...), models.KeyMismatchError)
    assert (
        "word_embeddings.weight has shape [97, 32], wanted [30522, 32]"
        " by vocab_size 30522 (absent, Hugging Face's default)"
    ) in message
    assert "absent      vocab_size is not in config.json and 30522 by Hugging Face's" in message


def test_default_number_of_layers_is_named_where_tensors_are_missing(tmp_path):
    message = refused(make(tmp_path / "m", num_hidden_layers=...), models.KeyMismatchError)
    assert "missing     encoder.layer.11." in message
    assert "absent      num_hidden_layers is not in config.json and 12 by Hugging" in message
    few = dict(list(good_tensors().items())[:8])
    message = refused(make(tmp_path / "n", few, num_hidden_layers=...), models.KeyMismatchError)
    assert "8 tensors for 12 layers" in message
    assert "absent      num_hidden_layers is not in config.json and 12 by Hugging" in message


def test_default_of_a_section_is_named_where_the_tensors_contradict_it(tmp_path):
    source = GOOD.parent / "parakeet"
    fields = json.loads((source / "config.json").read_text())
    del fields["encoder_config"]["subsampling_conv_channels"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    shutil.copyfile(source / "model.safetensors", tmp_path / "model.safetensors")
    message = refused(tmp_path, models.KeyMismatchError)
    default = "subsampling_conv_channels 256 (absent, Hugging Face's default)"
    assert f"wanted [256] by encoder_config.{default}" in message
