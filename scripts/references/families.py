"""The tiny Hugging Face models of text and images that `make_reference.py` makes fixtures of.

One entry a family; `references/audio.py` has those of audio.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import transformers


@dataclass(frozen=True)
class Family:
    """One model family: how to build a tiny model, feed it and look into it.

    Attributes:
      config: The tiny configuration.
      model: The class whose folder is the fixture.
      task_classes: Further classes; only the names and shapes of their tensors are kept.
      inputs: Makes the inputs.
      values: Runs a model and names its values.
      variant: Whether it varies another family, whose default scale and names are enough.
      default_scale: Whether a wrong epsilon shows only in a second weight set.
      double: Whether the expected values come from a run in f64, else in f32.
    """

    config: Callable[[], transformers.PretrainedConfig]
    model: type
    task_classes: tuple[type, ...]
    inputs: Callable[[np.random.Generator], dict[str, np.ndarray]]
    values: Callable[[torch.nn.Module, dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    variant: bool = False
    default_scale: bool = True
    double: bool = True


def bert_config() -> transformers.BertConfig:
    """Returns a BERT of 2 layers x 32 with a vocabulary that is no multiple of 8."""
    return transformers.BertConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=16,
        attn_implementation="eager",
    )


def bert_inputs(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns two sequences of 12 tokens, one of them padded on the right, in two segments."""
    mask = np.ones((2, 12), np.int32)
    mask[1, 7:] = 0
    types = np.zeros((2, 12), np.int32)
    types[0, 5:], types[1, 3:7] = 1, 1
    ids = generator.integers(1, 97, (2, 12)).astype(np.int32) * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def bert_values(model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs a BertModel."""
    output = model(**inputs, output_hidden_states=True)
    values = {
        "hidden_embedding": output.hidden_states[0],
        "hidden_block_0": output.hidden_states[1],
        "last_hidden_state": output.last_hidden_state,
        "pooler_output": output.pooler_output,
    }
    return {name: value for name, value in values.items() if value is not None}


def bert_masked_lm_config() -> transformers.BertConfig:
    """Returns a BERT of 2 layers x 16 with the tanh form of GELU, in blocks and head."""
    return transformers.BertConfig(
        vocab_size=41,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        hidden_act="gelu_new",
        attn_implementation="eager",
    )


def bert_masked_lm_inputs(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns the inputs of a BERT with a smaller vocabulary."""
    given = bert_inputs(generator)
    return given | {"input_ids": given["input_ids"] % 41}


def bert_masked_lm_values(model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs a BertForMaskedLM and the BertModel in it."""
    return bert_values(model.bert, inputs) | {"logits": model(**inputs).logits}


def vit_config() -> transformers.ViTConfig:
    """Returns a ViT of 2 layers x 24 with 6 heads, 25 patches and 5 labels."""
    return transformers.ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=40,
        image_size=20,
        patch_size=4,
        id2label={index: f"label {index}" for index in range(5)},
        attn_implementation="eager",
    )


def vit_features_config() -> transformers.ViTConfig:
    """Returns a ViT of 2 layers x 16 on one colour channel, without biases of query, key, value."""
    return transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=12,
        patch_size=4,
        num_channels=1,
        qkv_bias=False,
        attn_implementation="eager",
    )


def vit_inputs(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns two images of 20 x 20 in three colours."""
    return {"pixel_values": generator.uniform(-1, 1, (2, 3, 20, 20)).astype(np.float32)}


def vit_features_inputs(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns two images of 12 x 12 in grey."""
    return {"pixel_values": generator.uniform(-1, 1, (2, 1, 12, 12)).astype(np.float32)}


def vit_values(model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs a ViTForImageClassification and the ViTModel in it."""
    return vit_features_values(model.vit, inputs) | {"logits": model(**inputs).logits}


def vit_features_values(model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs a ViTModel."""
    output = model(**inputs, output_hidden_states=True)
    values = {
        "hidden_embedding": output.hidden_states[0],
        "hidden_block_0": output.hidden_states[1],
        "last_hidden_state": output.last_hidden_state,
        "pooler_output": output.pooler_output,
    }
    return {name: value for name, value in values.items() if value is not None}


def gpt2_config() -> transformers.GPT2Config:
    """Returns a GPT-2 of 2 layers x 32 with a vocabulary that is no multiple of 8."""
    return transformers.GPT2Config(
        vocab_size=97,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=16,
        bos_token_id=96,
        eos_token_id=96,
        attn_implementation="eager",
    )


def llama_config() -> transformers.LlamaConfig:
    """Returns a LLaMA of 2 layers x 32, 2 of 4 heads for keys, rope scaling in all its bands."""
    return transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        attn_implementation="eager",
    )


def bloom_config() -> transformers.BloomConfig:
    """Returns a BLOOM of 2 layers x 24 with 6 heads, no power of two."""
    return transformers.BloomConfig(
        vocab_size=97,
        hidden_size=24,
        n_layer=2,
        n_head=6,
        attn_implementation="eager",
    )


def bloom_inputs(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns two sequences of 12 tokens, one of them padded on the left."""
    given = decoder_inputs(generator)
    return {name: given[name] for name in ("input_ids", "attention_mask")}


def decoder_inputs(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns two sequences of 12 tokens, one of them padded on the left, with their positions."""
    mask = np.ones((2, 12), np.int32)
    mask[1, :5] = 0
    positions = np.maximum(mask.cumsum(1) - 1, 0).astype(np.int32)
    ids = generator.integers(1, 97, (2, 12)).astype(np.int32) * mask
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def llama_inputs(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns two sequences with positions far apart, one of them with a hole in its mask.

    A row that sees nothing, as with padding on the left, is NaN in an f64 run of this class.
    """
    given = decoder_inputs(generator)
    mask = np.ones((2, 12), np.int32)
    mask[1, 1:5] = 0
    positions = np.stack([5 * np.arange(12), np.arange(12) ** 2 // 2]).astype(np.int32)
    return given | {"attention_mask": mask, "position_ids": positions}


def decoder_values(model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs a decoder with its language model head."""
    output = model(**inputs, output_hidden_states=True, use_cache=False)
    return {
        "hidden_embedding": output.hidden_states[0],
        "hidden_block_0": output.hidden_states[1],
        "last_hidden_state": output.hidden_states[-1],
        "logits": output.logits,
    }


FAMILIES = {
    "bert": Family(
        config=bert_config,
        model=transformers.BertModel,
        task_classes=(
            transformers.BertForMaskedLM,
            transformers.BertForPreTraining,
            transformers.BertForSequenceClassification,
            transformers.BertForQuestionAnswering,
        ),
        inputs=bert_inputs,
        values=bert_values,
    ),
    "bert_masked_lm": Family(
        config=bert_masked_lm_config,
        model=transformers.BertForMaskedLM,
        task_classes=(),
        inputs=bert_masked_lm_inputs,
        values=bert_masked_lm_values,
        variant=True,
    ),
    # An f64 run is NaN in rows that see nothing, as with padding on the left.
    "bloom": Family(
        config=bloom_config,
        model=transformers.BloomForCausalLM,
        task_classes=(transformers.BloomModel,),
        inputs=bloom_inputs,
        values=decoder_values,
        default_scale=False,
        double=False,
    ),
    "gpt2": Family(
        config=gpt2_config,
        model=transformers.GPT2LMHeadModel,
        task_classes=(transformers.GPT2Model,),
        inputs=decoder_inputs,
        values=decoder_values,
        default_scale=False,
    ),
    "llama": Family(
        config=llama_config,
        model=transformers.LlamaForCausalLM,
        task_classes=(transformers.LlamaModel,),
        inputs=llama_inputs,
        values=decoder_values,
        default_scale=False,
    ),
    "vit": Family(
        config=vit_config,
        model=transformers.ViTForImageClassification,
        task_classes=(transformers.ViTModel,),
        inputs=vit_inputs,
        values=vit_values,
    ),
    "vit_features": Family(
        config=vit_features_config,
        model=transformers.ViTModel,
        task_classes=(),
        inputs=vit_features_inputs,
        values=vit_features_values,
        variant=True,
    ),
}
