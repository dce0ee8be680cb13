"""Configs as they are published: which layout they give, which RoPE identity, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.errors import ConfigError, UnsupportedModelError
from kvfs.pages.hf_config import CONFIG_BYTES_MAX, rope_identity
from kvfs.pages.layout import Need, PageLayout

LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3_ROPE,
    "torch_dtype": "bfloat16",
}
MISTRAL = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
}
QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
}
GEMMA2 = {
    "model_type": "gemma2",
    "head_dim": 256,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "cache_implementation": "hybrid",
    "torch_dtype": "float32",
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_size": 1152,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
}
#: the published file leaves out what equals the defaults of the class, the number of heads among it
GEMMA3_4B = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "torch_dtype": "bfloat16",
}
PHI3 = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "sliding_window": 2047,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
}
MIXTRAL = {**MISTRAL, "model_type": "mixtral", "sliding_window": None, "rope_theta": 1000000.0}
QWEN3_MOE = {**QWEN3, "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_hidden_layers": 48}
ALL = [
    LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3_1B, GEMMA3_4B, GPT_OSS, DEEPSEEK, PHI3,
]  # fmt: skip


def layout(config: Any, **more: Any) -> PageLayout:
    return PageLayout.from_hf_config(config, **more)


def shape(config: Any, **more: Any) -> dict[str, tuple[int, int, str, Need]]:
    """group -> (layers, heads, encoding, need)"""
    groups = layout(config, **more).groups
    return {g.name: (len(g.layers), g.heads, g.cell.encoding, g.need) for g in groups}


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (LLAMA, {"full": (32, 8, "bf16 k128+v128", Need.all())}),
        (MISTRAL, {"window": (32, 8, "bf16 k128+v128", Need.window_of(4096))}),
        (MIXTRAL, {"full": (32, 8, "bf16 k128+v128", Need.all())}),
        (PHI3, {"window": (32, 32, "bf16 k96+v96", Need.window_of(2047))}),
        (QWEN2, {"full": (28, 4, "bf16 k128+v128", Need.all())}),
        (QWEN3, {"full": (28, 8, "bf16 k128+v128", Need.all())}),
        (QWEN3_MOE, {"full": (48, 4, "bf16 k128+v128", Need.all())}),
        (
            GEMMA2,
            {
                "full": (13, 4, "f32 k256+v256", Need.all()),
                "window": (13, 4, "f32 k256+v256", Need.window_of(4096)),
            },
        ),
        (
            GEMMA3_1B,
            {
                "full": (4, 1, "bf16 k256+v256", Need.all()),
                "window": (22, 1, "bf16 k256+v256", Need.window_of(512)),
            },
        ),
        (
            GEMMA3_4B,
            {
                "full": (5, 4, "bf16 k256+v256", Need.all()),
                "window": (29, 4, "bf16 k256+v256", Need.window_of(1024)),
            },
        ),
        (DEEPSEEK, {"full": (61, 1, "bf16 latent 512+64 interleaved", Need.all())}),
    ],
    ids=lambda value: value.get("model_type") if "model_type" in value else "",
)
def test_a_published_config_gives_its_layout(config: dict[str, Any], groups: dict[str, Any]) -> None:
    assert shape(config) == groups


def test_gpt_oss_alternates_and_names_no_dtype() -> None:
    with pytest.raises(ConfigError, match="dtype is not in the config"):
        layout(GPT_OSS)
    groups = layout(GPT_OSS, dtype="bfloat16").groups
    assert [group.layers for group in groups] == [tuple(range(1, 24, 2)), tuple(range(0, 24, 2))]
    without = {key: value for key, value in GPT_OSS.items() if key != "layer_types"}
    assert layout(without, dtype="bf16").groups == groups


def test_gemma_layers_slide_but_every_nth() -> None:
    assert layout(GEMMA2).group("window").layers == tuple(range(0, 26, 2))
    assert layout(GEMMA3_1B).group("full").layers == (5, 11, 17, 23)


def test_layer_types_say_the_same_as_the_pattern() -> None:
    types = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(26)]
    new = {key: value for key, value in GEMMA3_1B.items() if key != "sliding_window_pattern"}
    assert layout({**new, "layer_types": types}) == layout(GEMMA3_1B)


def test_qwen_layers_slide_from_max_window_layers_on() -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 20}
    for base in (QWEN2, QWEN3):
        groups = layout({**base, **sliding})
        assert groups.group("full").layers == tuple(range(20))
        assert groups.group("window").layers == tuple(range(20, 28))


def test_absent_fields_get_the_defaults_of_the_class() -> None:
    for field in ("num_key_value_heads", "head_dim"):
        null = {**LLAMA, field: None}
        absent = {key: value for key, value in LLAMA.items() if key != field}
        assert layout(null) == layout(absent)
    assert layout({**LLAMA, "num_key_value_heads": None}).groups[0].heads == 32
    hidden = ("sliding_window", "num_key_value_heads")
    absent = {key: value for key, value in MISTRAL.items() if key not in hidden}
    assert layout(absent) == layout(MISTRAL)
    assert shape({**MISTRAL, "sliding_window": None})["full"][3] == Need.all()


def test_the_cache_may_have_a_dtype_of_its_own() -> None:
    assert shape(LLAMA, dtype="float16")["full"][2] == "f16 k128+v128"
    assert shape(LLAMA, dtype="int8", scale="float32")["full"][2] == "int8 k128+v128+f32 scale 2"
    static = {"dtype": "float8_e4m3fn", "scale_digest": "unit"}
    assert shape(DEEPSEEK, **static)["full"][2] == "float8_e4m3fn latent 512+64 interleaved static unit"
    assert shape(DEEPSEEK, rope="halves")["full"][2] == "bf16 latent 512+64 halves"
    with pytest.raises(ConfigError, match="MLA hold no scales"):
        layout(DEEPSEEK, dtype="int8", scale="float32")


def test_both_spellings_of_the_dtype_are_read() -> None:
    new = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    assert layout({**new, "dtype": "bfloat16"}) == layout(LLAMA)


def test_a_config_comes_as_dict_path_or_object(tmp_path: Path) -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return dict(LLAMA)

    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert layout(path) == layout(str(path)) == layout(Config()) == layout(LLAMA, page_tokens=64)


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    for name, text in [("no.json", "{"), ("list.json", "[]"), ("deep.json", "[" * 100_000)]:
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError):
            layout(tmp_path / name)
    (tmp_path / "big.json").write_bytes(b" " * (CONFIG_BYTES_MAX + 1))
    remedy = "pass the path"
    for path, message in [("big.json", "larger than"), ("absent.json", remedy), (".", remedy)]:
        with pytest.raises(ConfigError, match=message):
            layout(tmp_path / path)
    with pytest.raises(ConfigError, match="null byte"):
        layout("a\0b")
    with pytest.raises(ConfigError, match="config is int"):
        layout(7)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**LLAMA, "model_type": "mamba2"}, "model_type"),
        ({**LLAMA, "model_type": None}, "model_type"),
        ({**GEMMA3_4B, "model_type": "paligemma"}, "model_type"),
        ({**GEMMA3_4B, "text_config": {"model_type": "gemma3n_text"}}, "model_type"),
        ({**GEMMA3_1B, "num_kv_shared_layers": 10}, "num_kv_shared_layers"),
        ({**GEMMA3_1B, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**QWEN2, "is_causal": False}, "is_causal"),
        ({**LLAMA, "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({**LLAMA, "add_cross_attention": True}, "add_cross_attention"),
        ({**LLAMA, "cache_implementation": "quantized"}, "cache_implementation"),
        ({**QWEN3, "layer_types": ["linear_attention"] * 28}, "layer_types"),
        ({**QWEN3, "layer_types": ["sliding_attention"] * 28}, "layer_types"),
        ({**QWEN3, "layer_types": ["full_attention"] * 27}, "layer_types"),
        ({**QWEN3, "layer_types": "full_attention"}, "layer_types"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, "layer_types"),
        ({**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
        ({**DEEPSEEK, "index_topk": 2048}, "index_topk"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling"),
        ({**LLAMA, "rope_parameters": {"rope_type": "longrope"}, "rope_scaling": None}, "rope_scaling"),
        ({**PHI3, "rope_scaling": {"type": "su"}}, "rope_scaling"),
        ({**PHI3, "rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({**LLAMA, "rope_scaling": {"type": "mrope"}}, "rope_scaling"),
        ({**LLAMA, "rope_parameters": {"rope_type": "default"}}, "rope_scaling"),
        ({**QWEN2, "rope_parameters": {"rope_theta": 5.0}}, "rope_theta"),
        ({**GEMMA3_1B, "rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({**LLAMA, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "kv_cache_scheme"),
        (
            {**LLAMA, "quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}},
            "kv_cache_quant_algo",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_that_is_not_understood_is_refused_by_field(config: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"^[\w.]*{field} is .*: .+; .+"):
        layout(config)


def test_a_quantised_checkpoint_is_served_with_the_dtype_of_its_cache() -> None:
    config = {**LLAMA, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}
    assert layout(config, dtype="bfloat16") == layout(LLAMA)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": 33}, "hidden_size"),
        ({"head_dim": True}, "head_dim"),
        ({"torch_dtype": "float64"}, "dtype"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_scaling"),
    ],
)
def test_an_invalid_value_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        layout({**LLAMA, **change})


json_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
lists = st.lists(json_values, max_size=3)
objects = st.dictionaries(st.text(max_size=6), json_values, max_size=2)
nested = json_values | lists | objects


@settings(max_examples=300)
@given(st.sampled_from(ALL), st.data(), nested)
def test_a_damaged_config_raises_nothing_but_config_errors(
    config: dict[str, Any], data: st.DataObject, value: Any
) -> None:
    key = data.draw(st.sampled_from([*config, "rope_parameters", "layer_types", "head_dim"]))
    try:
        layout({**config, key: value}, dtype="bfloat16")
        json.dumps(rope_identity({**config, key: value}), allow_nan=False)
    except ConfigError:
        pass


# ---------------------------------------------------------------- RoPE


def test_the_spellings_of_transformers_4_and_5_are_one_identity() -> None:
    for old in (LLAMA, QWEN3, DEEPSEEK, GPT_OSS, MISTRAL):
        new = {key: value for key, value in old.items() if key not in ("rope_theta", "rope_scaling")}
        scaling = dict(old.get("rope_scaling") or {})
        scaling["rope_type"] = scaling.get("type", scaling.get("rope_type", "default"))
        new["rope_parameters"] = {**scaling, "rope_theta": old["rope_theta"]}
        assert rope_identity(new) == rope_identity(old)


def test_gemma3_rotates_its_sliding_layers_by_a_theta_of_their_own() -> None:
    old = rope_identity(GEMMA3_4B)
    assert old == {
        "full": {"factor": 8.0, "partial_rotary_factor": 1.0, "rope_theta": 1e6, "rope_type": "linear"},
        "window": {"partial_rotary_factor": 1.0, "rope_theta": 10000.0, "rope_type": "default"},
    }
    text = {key: value for key, value in GEMMA3_4B["text_config"].items() if key != "rope_scaling"}
    text["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert rope_identity({**GEMMA3_4B, "text_config": text}) == old


def test_thetas_default_to_those_of_the_class() -> None:
    thetas = {"llama": 10000.0, "mixtral": 1e6, "gpt_oss": 150000.0}
    for config in (LLAMA, MIXTRAL, GPT_OSS):
        bare = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
        assert rope_identity(bare)["all"]["rope_theta"] == thetas[config["model_type"]]
    assert rope_identity({**GPT_OSS, "rope_scaling": None}) == rope_identity(GPT_OSS)
    assert rope_identity({**GPT_OSS, "rope_scaling": None, "rope_parameters": None}) == rope_identity(GPT_OSS)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 500001.0},
        {"rope_scaling": {**LLAMA3_ROPE, "factor": 4.0}},
        {"rope_scaling": {**LLAMA3_ROPE, "rope_type": "yarn"}},
        {"rope_scaling": None},
        {"partial_rotary_factor": 0.5},
        {"max_position_embeddings": 4096},
    ],
)
def test_every_change_of_the_rotation_changes_the_identity(change: dict[str, Any]) -> None:
    assert rope_identity({**LLAMA, **change}) != rope_identity(LLAMA)


def test_numbers_mean_the_same_as_integers_and_floats() -> None:
    assert rope_identity({**LLAMA, "rope_theta": 500000}) == rope_identity(LLAMA)
    assert json.loads(json.dumps(rope_identity(LLAMA))) == rope_identity(LLAMA)


def test_a_fixed_rope_identity_never_changes() -> None:
    assert rope_identity(LLAMA) == {
        "all": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "max_position_embeddings": 131072.0,
            "original_max_position_embeddings": 8192.0,
            "partial_rotary_factor": 1.0,
            "rope_theta": 500000.0,
            "rope_type": "llama3",
        }
    }


def test_deepseek_v3_says_how_its_rotary_part_is_interleaved() -> None:
    assert rope_identity(DEEPSEEK)["all"]["rope_interleave"] is True
    assert rope_identity({**DEEPSEEK, "rope_interleave": False}) != rope_identity(DEEPSEEK)
