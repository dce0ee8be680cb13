"""Small random models with a tokenizer, built on the spot, whose tokens depend on the whole prompt."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

ROOT = Path(__file__).resolve().parents[2]
_BASE = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
#: gemma3 has two layers with a window of 128 tokens for each with full attention: hybrid groups of the engine
CONFIGS = {
    "llama": lambda: LlamaConfig(num_hidden_layers=4, **_BASE),
    "qwen3": lambda: Qwen3Config(num_hidden_layers=4, **_BASE),
    "gemma3": lambda: Gemma3TextConfig(
        num_hidden_layers=6, sliding_window=128, sliding_window_pattern=3, query_pre_attn_scalar=32, **_BASE
    ),
    # twice the head size in layers with full attention: blocks of 32 tokens there, of 64 in the others
    "gemma4": lambda: Gemma4TextConfig(
        num_hidden_layers=6, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=128, global_head_dim=64, num_global_key_value_heads=2, hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=2048, **_BASE,
    ),
}  # fmt: skip


def build(kind: str, folder: Path, seed: int = 0) -> Path:
    """Write model and tokenizer. Attention is sharp, so that tokens depend on distant ones."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3 if "q_proj" in name or "k_proj" in name else 0.1)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([(ROOT / "docs" / "format.md").read_text()], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


def build_adapter(folder: Path, seed: int, layers: int = 4) -> Path:
    """Write a LoRA adapter for the attention of a model of ``CONFIGS``, strong enough to change tokens."""
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    hidden, rank = int(_BASE["hidden_size"]), 8
    sizes = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
    weights = {}
    for layer in range(layers):
        for name, size in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) * 0.3
            weights[f"{at}.lora_B.weight"] = torch.randn(size, rank, generator=generator) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": list(sizes), "bias": "none",
              "task_type": "CAUSAL_LM", "base_model_name_or_path": "m"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def build_eagle(folder: Path, seed: int = 0) -> Path:
    """Write a random head of EAGLE for the models of ``CONFIGS``: one layer, with the model's embeddings."""
    generator = torch.Generator().manual_seed(seed)
    LlamaConfig(num_hidden_layers=1, architectures=["LlamaForCausalLM"], **_BASE).save_pretrained(folder)
    hidden, inner = int(_BASE["hidden_size"]), int(_BASE["intermediate_size"])
    shapes = {
        "fc": (hidden, 2 * hidden), "layers.0.self_attn.q_proj": (128, hidden),
        "layers.0.self_attn.k_proj": (64, hidden), "layers.0.self_attn.v_proj": (64, hidden),
        "layers.0.self_attn.o_proj": (hidden, 128),
        "layers.0.mlp.gate_proj": (inner, hidden), "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    weights = {f"{name}.weight": torch.randn(*shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    save_file(weights, folder / "model.safetensors")
    return folder
