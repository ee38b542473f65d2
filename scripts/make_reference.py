"""Writes the reference fixtures of tests/data: tiny Hugging Face models and what they compute.

Runs in an environment of its own, which the project never imports:

    python3.11 -m venv ref && ref/bin/pip install torch transformers==4.57.1 safetensors "numpy<3"
    ref/bin/python scripts/make_reference.py tests/data --minilm FOLDER_OF_ALL_MINILM_L6_V2

Each family is one entry of FAMILIES. A fixture is a Hugging Face folder (config.json,
model.safetensors) with reference.npz beside it: inputs, hidden states after the embeddings, after
block 0 and at the end, outputs, and a JSON text `meta` with versions and command. Expected values
come from a run in f64, stored as f32. Weights are random everywhere: a default initialisation hides
dropped biases, a transposed square matrix and a wrong GELU. A second set at the default scale makes
a wrong epsilon visible. A second run writes the same bytes, or says which tensor changed.
"""

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import tokenizers
import torch
import transformers
from safetensors.numpy import load_file

SEED = 20
SENTENCES = (
    "A warm loaf of bread is cooling on the kitchen table.",
    "Fresh bread stands on the table in the kitchen.",
    "The telescope photographed a spiral galaxy.",
    "Astronomers took a picture of a distant galaxy.",
    "Rain.",
    "How many stops are there between the harbour and the main station?",
    "The committee postponed its vote, since three of its nine members had fallen ill.",
    "Sorting a list of n numbers by comparisons takes on the order of n log n steps at best.",
)


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


def conformer_config() -> transformers.Wav2Vec2ConformerConfig:
    """Returns a Conformer of 2 layers x 24, relative positions, a LayerNorm on every conv."""
    return transformers.Wav2Vec2ConformerConfig(
        vocab_size=13,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=40,
        hidden_act="swish",
        conv_dim=(12, 16, 20),
        conv_kernel=(10, 3, 2),
        conv_stride=(5, 2, 2),
        conv_bias=True,
        feat_extract_norm="layer",
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_codevectors_per_group=4,
        codevector_dim=8,
        proj_codevector_dim=8,
        conv_depthwise_kernel_size=7,
        position_embeddings_type="relative",
        pad_token_id=3,
    )


def conformer_rotary_config() -> transformers.Wav2Vec2ConformerConfig:
    """Returns a Conformer with rotary positions, GELU, and a norm on the first conv alone."""
    config = conformer_config()
    config.position_embeddings_type = "rotary"
    config.hidden_act = "gelu"
    config.conv_bias = False
    config.feat_extract_norm = "group"
    return config


def conformer_inputs(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns 400 and 250 samples, the second padded on the right: 19 and 12 frames."""
    mask = np.ones((2, 400), np.int32)
    mask[1, 250:] = 0
    audio = generator.normal(size=(2, 400)).astype(np.float32) * mask
    return {"input_values": audio, "attention_mask": mask}


def conformer_values(model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs a Wav2Vec2ConformerForCTC and the Wav2Vec2ConformerModel in it."""
    values = conformer_features_values(model.wav2vec2_conformer, inputs)
    return values | {"logits": model(**inputs).logits}


def conformer_features_values(model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs a Wav2Vec2ConformerModel."""
    output = model(**inputs, output_hidden_states=True)
    return {
        "hidden_embedding": output.hidden_states[0],
        "hidden_block_0": output.hidden_states[1],
        "last_hidden_state": output.last_hidden_state,
    }


def parakeet_config() -> transformers.ParakeetCTCConfig:
    """Returns a Parakeet of 2 layers x 24 on 24 mel bins, its length cut to an eighth."""
    encoder = transformers.ParakeetEncoderConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=40,
        conv_kernel_size=5,
        subsampling_factor=8,
        subsampling_conv_channels=6,
        num_mel_bins=24,
        max_position_embeddings=32,
    )
    return transformers.ParakeetCTCConfig(
        vocab_size=13, pad_token_id=12, encoder_config=encoder.to_dict()
    )


def parakeet_inputs(generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns 83 and 50 frames of a spectrogram, the second padded on the right: 11 and 7."""
    mask = np.ones((2, 83), np.int32)
    mask[1, 50:] = 0
    mels = generator.normal(size=(2, 83, 24)) * mask[:, :, None]
    return {"input_features": mels.astype(np.float32), "attention_mask": mask}


def parakeet_values(model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs a ParakeetForCTC; what the subsampling gives is scaled as the encoder scales it."""
    states = []
    hooks = [
        layer.register_forward_hook(lambda _, __, output: states.append(output))
        for layer in (model.encoder.subsampling, model.encoder.layers[0])
    ]
    last = model.encoder(**inputs).last_hidden_state
    for hook in hooks:
        hook.remove()
    return {
        "hidden_embedding": states[0] * model.encoder.input_scale,
        "hidden_block_0": states[1],
        "last_hidden_state": last,
        "logits": model(**inputs).logits,
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
    "conformer": Family(
        config=conformer_config,
        model=transformers.Wav2Vec2ConformerForCTC,
        task_classes=(
            transformers.Wav2Vec2ConformerModel,
            transformers.Wav2Vec2ConformerForPreTraining,
        ),
        inputs=conformer_inputs,
        values=conformer_values,
        default_scale=False,
    ),
    "conformer_rotary": Family(
        config=conformer_rotary_config,
        model=transformers.Wav2Vec2ConformerModel,
        task_classes=(),
        inputs=conformer_inputs,
        values=conformer_features_values,
        variant=True,
    ),
    "parakeet": Family(
        config=parakeet_config,
        model=transformers.ParakeetForCTC,
        task_classes=(),
        inputs=parakeet_inputs,
        values=parakeet_values,
        variant=True,
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


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Replaces every parameter and statistic by random values that no fault can hide behind."""
    norms = {n for n, m in model.named_modules() if "norm" in type(m).__name__.lower()}
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner, _, leaf = name.rpartition(".")
        # The frequencies of rotary positions are no weights; they follow from the configuration.
        if not tensor.is_floating_point() or leaf == "inv_freq":
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if leaf == "running_var":
            value = 0.5 + torch.rand(tensor.shape, generator=generator)
        elif leaf == "running_mean":
            value = 0.3 * noise
        elif owner in norms and leaf == "weight":
            value = 1 + 0.2 * noise
        else:
            value = (0.25 if tensor.ndim > 1 else 0.2) * noise
        tensor.data.copy_(value)


def make_fixture(family: Family, folder: Path, random_everywhere: bool) -> list[str]:
    """Writes one folder with weights and reference; returns what changed."""
    torch.manual_seed(SEED)
    model = family.model(family.config()).eval()
    if random_everywhere:
        randomise(model, torch.Generator().manual_seed(SEED))
    inputs = family.inputs(np.random.default_rng(SEED))
    with tempfile.TemporaryDirectory() as temporary:
        model.save_pretrained(temporary)
        np.savez(Path(temporary, "reference.npz"), **run(family, model, inputs))
        return [
            change
            for name in ("config.json", "model.safetensors", "reference.npz")
            for change in replace(Path(temporary, name), folder / name)
        ]


def run(family: Family, model, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays of a reference file: inputs, outputs of an f64 run, provenance."""
    tensors = {name: as_tensor(value) for name, value in inputs.items()}
    with torch.no_grad():
        exact = copy.deepcopy(model).double() if family.double else model
        values = family.values(exact, tensors)
    outputs = {f"outputs.{n}": v.numpy().astype(np.float32) for n, v in values.items()}
    return {f"inputs.{n}": v for n, v in inputs.items()} | outputs | {"meta": provenance()}


def as_tensor(value: np.ndarray) -> torch.Tensor:
    """Returns an input as the f64 run takes it."""
    tensor = torch.from_numpy(value)
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def make_names(family: Family, folder: Path) -> list[str]:
    """Writes the tensor names and shapes that each class saves, and a sharded folder's index."""
    names = {}
    with tempfile.TemporaryDirectory() as temporary:
        for kind in (family.model, *family.task_classes):
            place = Path(temporary, kind.__name__)
            kind(family.config()).save_pretrained(place)
            tensors = load_file(place / "model.safetensors")
            names[kind.__name__] = {key: list(tensors[key].shape) for key in sorted(tensors)}
        place = Path(temporary, "sharded")
        family.model(family.config()).save_pretrained(place, max_shard_size="30KB")
        index = json.loads((place / "model.safetensors.index.json").read_text())
        new = Path(temporary, "names.json")
        new.write_text(json.dumps({"classes": names, "index": index}, indent=1) + "\n")
        return replace(new, folder / "names.json")


def make_frequencies(file: Path) -> list[str]:
    """Writes the rotary frequencies of LLaMA 3.1, whose last bits matter at far positions."""
    config = llama_config()
    config.head_dim, config.max_position_embeddings = 128, 131072
    config.rope_scaling["original_max_position_embeddings"] = 8192
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    with tempfile.TemporaryDirectory() as temporary:
        new = Path(temporary, "frequencies.npz")
        np.savez(new, frequencies=rotary.inv_freq.numpy(), meta=provenance())
        return replace(new, file)


def make_sentences(source: Path, file: Path) -> list[str]:
    """Writes the embeddings of a few sentences by the real all-MiniLM-L6-v2."""
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(list(SENTENCES))
    ids = np.array([e.ids for e in encodings], np.int32)
    mask = np.array([e.attention_mask for e in encodings], np.int32)
    model = transformers.AutoModel.from_pretrained(source, attn_implementation="eager")
    with torch.no_grad():
        weights = torch.from_numpy(mask).double()
        output = model.eval().double()(torch.from_numpy(ids).long(), weights.long())
        total = (output.last_hidden_state * weights[..., None]).sum(1)
        embeddings = torch.nn.functional.normalize(total, dim=1).numpy().astype(np.float32)
    with tempfile.TemporaryDirectory() as temporary:
        new = Path(temporary, "sentences.npz")
        np.savez(
            new,
            sentences=np.array(SENTENCES),
            input_ids=ids,
            attention_mask=mask,
            embeddings=embeddings,
            meta=provenance(),
        )
        return replace(new, file)


def provenance() -> str:
    """Returns the versions and the command as JSON."""
    return json.dumps(
        {
            "origin": f"transformers {transformers.__version__}",
            "torch": torch.__version__,
            "safetensors": safetensors.__version__,
            "numpy": np.__version__,
            "command": "python scripts/make_reference.py tests/data --minilm FOLDER",
        }
    )


def replace(new: Path, old: Path) -> list[str]:
    """Puts a new file in the place of an old one; returns the names of what changed in it."""
    if old.exists() and old.read_bytes() == new.read_bytes():
        return []
    changes = (
        [f"{old}: {name}" for name in differing(new, old)] if old.exists() else [f"{old}: new"]
    )
    old.parent.mkdir(parents=True, exist_ok=True)
    old.write_bytes(new.read_bytes())
    return changes


def differing(new: Path, old: Path) -> list[str]:
    """Returns the names of the tensors that differ between two files, or a word for other files."""
    if new.suffix == ".json":
        return ["text"]
    load = load_file if new.suffix == ".safetensors" else np.load
    one, other = dict(load(new)), dict(load(old))
    shared = set(one) & set(other)
    return sorted((set(one) ^ set(other)) | {n for n in shared if not same(one[n], other[n])})


def same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays are equal bit for bit."""
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


def main() -> None:
    """Makes all fixtures and prints what changed."""
    parser = argparse.ArgumentParser(description="Write the reference fixtures of the tests.")
    parser.add_argument("target", type=Path, help="the folder, usually tests/data")
    parser.add_argument("--minilm", type=Path, help="folder of the real all-MiniLM-L6-v2")
    parser.add_argument("--family", choices=sorted(FAMILIES), action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    changes = []
    for name in options.family or sorted(FAMILIES):
        family = FAMILIES[name]
        changes += make_fixture(family, options.target / name, random_everywhere=True)
        if family.variant:
            continue
        if family.default_scale:
            folder = options.target / f"{name}_default"
            changes += make_fixture(family, folder, random_everywhere=False)
        changes += make_names(family, options.target / name)
        if name == "llama":
            changes += make_frequencies(options.target / name / "frequencies.npz")
    if options.minilm:
        changes += make_sentences(options.minilm, options.target / "minilm" / "sentences.npz")
    print("\n".join(changes) or "nothing changed")
    print(json.dumps({"changed": len(changes)} | json.loads(provenance())), file=sys.stderr)


if __name__ == "__main__":
    main()
