"""A Llama of random weights, small enough to be made on the spot: no hub, no download, under a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy

__all__ = ["make_tiny_llama"]

_LAYERS, _HIDDEN, _MLP, _HEADS, _KV_HEADS, _VOCABULARY, _CONTEXT = 2, 64, 128, 2, 1, 512, 2048
_SENTENCES = (
    "the load of a rank is four numbers",
    "a reader never waits for a writer",
    "the scheduler comes first",
    "unknown is not idle",
)


def make_tiny_llama(folder: Path, seed: int = 0) -> None:
    """Write a model and its tokenizer to ``folder``, in the files of the transformers library; half a megabyte.

    It has 2 layers and a context of 2048 tokens, and its words are noise.
    """
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(_weights(numpy.random.default_rng(seed)), folder / "model.safetensors", {"format": "pt"})
    _write(folder / "config.json", _config())
    _write(
        folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
    )
    _train_tokenizer().save(str(folder / "tokenizer.json"))


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32",
        "hidden_size": _HIDDEN, "intermediate_size": _MLP, "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS, "head_dim": _HIDDEN // _HEADS,
        "vocab_size": _VOCABULARY, "max_position_embeddings": _CONTEXT, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.02, "use_cache": True,
    }  # fmt: skip


def _weights(random: numpy.random.Generator) -> dict[str, numpy.ndarray]:
    def noise(*shape: int) -> numpy.ndarray:
        return random.normal(0.0, 0.02, shape).astype(numpy.float32)

    ones = numpy.ones(_HIDDEN, numpy.float32)
    kv = _HIDDEN // _HEADS * _KV_HEADS
    weights = {
        "model.embed_tokens.weight": noise(_VOCABULARY, _HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": noise(_VOCABULARY, _HIDDEN),
    }
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}self_attn.q_proj.weight": noise(_HIDDEN, _HIDDEN),
            f"{at}self_attn.k_proj.weight": noise(kv, _HIDDEN),
            f"{at}self_attn.v_proj.weight": noise(kv, _HIDDEN),
            f"{at}self_attn.o_proj.weight": noise(_HIDDEN, _HIDDEN),
            f"{at}mlp.gate_proj.weight": noise(_MLP, _HIDDEN),
            f"{at}mlp.up_proj.weight": noise(_MLP, _HIDDEN),
            f"{at}mlp.down_proj.weight": noise(_HIDDEN, _MLP),
            f"{at}input_layernorm.weight": ones,
            f"{at}post_attention_layernorm.weight": ones,
        }
    return weights


def _train_tokenizer() -> Any:  # of a library that is there with vLLM only
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return tokenizer
