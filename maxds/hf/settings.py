"""config.json <-> the model section of a config."""

import dataclasses
import json
import pathlib
from typing import Any

from maxds import loader
from maxds.architecture import COMPRESSED_KEYS, LATENT_KEYS, Model, RopeScaling
from maxds.hf import v4
from maxds.hf.files import FormatError
from maxds.hf.quantized import BLOCK

_V3 = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_DENSE = {"index_topk": (None,)}  # without indexers
# Builds: what each says of the router in code, and may leave out of config.json; the first is what it means then.
_BUILDS: dict[str, dict[str, tuple]] = {
    "deepseek_v2": {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "norm_topk_prob": (False,),
    }
    | _DENSE,
    "deepseek_v3": _V3 | _DENSE,
    "deepseek_v32": _V3,
    "kimi_k2": _V3 | _DENSE,
    "deepseek_v4": v4.CHOICES,
}
_ARCHITECTURES = {  # the first whose choices a model has made
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
}
# What else the builds have no choice in.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
}
_FIXED_LATENT = {
    "moe_layer_freq": 1,
    "rope_interleave": True,
}
_NOT_V4 = *LATENT_KEYS.split(), "intermediate_size", "first_k_dense_replace"
_V4_ONLY = *v4.NEEDED, "compress_rope_theta", "hc_sinkhorn_iters", "hc_eps", *COMPRESSED_KEYS.split()
_ENGRAM = tuple(f.name for f in dataclasses.fields(Model) if f.name.startswith("engram_"))
_UNUSED = """_name_or_path architectures auto_map aux_loss_alpha bos_token_id chunk_size_feed_forward dtype eos_token_id
    ep_group ep_size expert_dtype head_dim id2label is_encoder_decoder label2id model_type num_key_value_heads
    output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type qk_head_dim
    quantization_config return_dict router_aux_loss_coef router_jitter_noise seq_aux torch_dtype transformers_version
    unsloth_fixed use_cache""".split()

TOKENS = "bos_token_id", "eos_token_id", "pad_token_id"
# Type, type of the items, and the keys that have to be of it.
_KINDS = (
    (list, int, "compress_ratios"),
    (list, str, "layer_types mlp_layer_types"),
    (dict, int, "compress_rates"),
    (dict, object, "rope_parameters rope_scaling quantization_config"),
    (int, object, "num_hidden_layers num_nextn_predict_layers first_k_dense_replace head_dim max_position_embeddings"),
)


def read(folder: pathlib.Path) -> dict[str, Any]:
    """The model section of a config, out of a folder's config.json.

    Raises:
      FormatError: it cannot be read, or is of a model that maxds has not; every mistake in it.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} cannot be read ({error}); name a folder in Hugging Face's format") from error
    build = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(build, str) or build not in _BUILDS:
        raise FormatError(f"{path}: model_type is {build}; maxds converts {', '.join(_BUILDS)}")
    mistakes: list[str] = []
    model = _model(raw, build, mistakes)
    if mistakes:
        raise FormatError("\n".join(f"{path}: {mistake}" for mistake in mistakes))
    return model


def _model(raw: dict[str, Any], build: str, mistakes: list[str]) -> dict[str, Any]:
    of_v4, raw = build == "deepseek_v4", _well_formed(raw, mistakes)
    raw = v4.read(raw, mistakes) if of_v4 else raw
    fields = {f.name: f for f in dataclasses.fields(Model) if f.name not in (_NOT_V4 if of_v4 else _V4_ONLY)}
    raw |= _rope(raw.pop("rope_parameters", None), raw, mistakes)
    for key, choices in _BUILDS[build].items():
        if raw.setdefault(key, choices[0]) not in choices:
            mistakes.append(f"{key} is {raw[key]}; a {build} model has {' or '.join(map(str, choices))}")
    raw["n_shared_experts"] = raw.get("n_shared_experts") or 0
    for key in ("n_group", "topk_group"):
        raw[key] = raw.get(key) or 1
    fixed = _FIXED if of_v4 else _FIXED | _FIXED_LATENT
    for key, value in fixed.items():
        if raw.get(key, value) not in (value, None):
            mistakes.append(f"{key} is {raw[key]}; maxds knows {value}")
    if build == "deepseek_v32":
        _check_layers(raw, mistakes)
    _check_key_heads(raw, of_v4, mistakes)
    _check_quantization(raw.get("quantization_config"), mistakes)
    known = {*fields, *_UNUSED, *fixed}
    mistakes += [f"unknown key {key}; remove it if it changes nothing that is computed" for key in raw.keys() - known]
    missing = [k for k, f in fields.items() if k not in raw and f.default is dataclasses.MISSING]
    missing += [k for k in v4.NEEDED if of_v4 and raw.get(k) is None]
    mistakes += [f"missing key {key}" for key in missing]
    return {key: raw[key] for key in fields if key in raw}


def _well_formed(raw: dict[str, Any], mistakes: list[str]) -> dict[str, Any]:
    """Without what is of another type than it has to be."""
    kinds = {key: (kind, item) for kind, item, keys in _KINDS for key in keys.split() if raw.get(key) is not None}
    wrong = {key: kinds[key] for key in kinds if not _is_of(raw[key], *kinds[key])}
    for key, (kind, item) in wrong.items():
        of = f" of {item.__name__}" if item is not object else ""
        mistakes.append(f"{key} is {raw[key]}; it must be a {kind.__name__}{of}")
    return {key: value for key, value in raw.items() if key not in wrong}


def _is_of(value: Any, kind: type, item: type) -> bool:
    if not isinstance(value, kind):
        return False
    if isinstance(value, int):
        return abs(value) < 2**53  # what computes with it may take it for a float
    return all(isinstance(one, item) for one in (value.values() if isinstance(value, dict) else value))


def _check_layers(raw: dict[str, Any], mistakes: list[str]) -> None:
    """Of V3.2, transformers says of each layer what `first_k_dense_replace` says of all."""
    layers, dense = raw.get("num_hidden_layers") or 0, raw.get("first_k_dense_replace") or 0
    for key, kinds in {
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "layer_types": ["indexed_attention"] * layers,
    }.items():
        if (found := raw.pop(key, None)) not in (kinds, None):
            mistakes.append(f"{key} is {found}; with first_k_dense_replace={dense} maxds knows {kinds}")


def _check_key_heads(raw: dict[str, Any], of_v4: bool, mistakes: list[str]) -> None:
    wanted = 1 if of_v4 else raw.get("num_attention_heads")
    if raw.get("num_key_value_heads") not in (None, wanted):
        why = "1" if of_v4 else f"num_attention_heads={wanted}"
        mistakes.append(f"num_key_value_heads is {raw['num_key_value_heads']}; it must be {why}")


def _rope(given: dict | None, raw: dict[str, Any], mistakes: list[str]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which newer files have in one, `rope_parameters`."""
    scaling = dict(given if given is not None else raw.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", raw.get("rope_theta", 10000.0))
    kinds = {str(scaling.pop(key, "default")) for key in ("type", "rope_type")} - {"default"}
    if not kinds:
        return {"rope_theta": theta, "rope_scaling": None}
    known = {f.name for f in dataclasses.fields(RopeScaling)}
    mistakes += [f"unknown key rope_scaling.{key}" for key in scaling.keys() - known]
    if kinds != {"yarn"}:
        mistakes.append(f"rope_scaling is of type {' and '.join(sorted(kinds))}; maxds knows yarn")
    mistakes += [
        f"missing key rope_scaling.{k}" for k in ("factor", "original_max_position_embeddings") - scaling.keys()
    ]
    return {"rope_theta": theta, "rope_scaling": {"type": "yarn"} | {k: v for k, v in scaling.items() if k in known}}


def _check_quantization(given: dict | None, mistakes: list[str]) -> None:
    wanted = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    if given is not None and any(given.get(key, value) != value for key, value in wanted.items()):
        found = ", ".join(f"{key} {given.get(key)}" for key in wanted)
        mistakes.append(
            f"quantization_config has {found}; maxds dequantizes fp8, e4m3, [{BLOCK}, {BLOCK}]: of others, make "
            f"bfloat16 first, and remove quantization_config"
        )


def write(model: Model, dtype: str, tokens: dict[str, Any] | None = None) -> str:
    """config.json of a model, as transformers reads it.

    Args:
      model: any that maxds trains.
      dtype: of the weights, in torch's words.
      tokens: of `TOKENS`, those that there are.

    Raises:
      FormatError: transformers has no such model.
    """
    values = loader.plain(model)
    if model.compress_ratios is None:
        build, mistakes = _latent_build(model, values)
    else:
        build, mistakes = "deepseek_v4", v4.mistakes(model)
    if model.engram_layer_ids:
        mistakes.append(f"model.engram_layer_ids={values['engram_layer_ids']}: Engram is not converted yet")
    if mistakes:
        raise FormatError("\n".join(mistakes))
    if model.compress_ratios is None:
        left_out, more = _V4_ONLY, _FIXED_LATENT | {"num_key_value_heads": model.num_attention_heads}
    else:
        left_out, more = _NOT_V4, v4.write(model) | {"num_key_value_heads": 1}
    more |= _FIXED | {"torch_dtype": dtype, "use_cache": True}
    values = {key: value for key, value in values.items() if key not in (*left_out, *_ENGRAM)}
    values = {key: value for key, value in values.items() if value is not None or not key.startswith("index_")}
    about = {"architectures": [_ARCHITECTURES[build]], "model_type": build}
    return json.dumps(about | more | values | dict.fromkeys(TOKENS) | (tokens or {}), indent=2) + "\n"


def _latent_build(model: Model, values: dict[str, Any]) -> tuple[str, list[str]]:
    """The build of a model with latent attention, and why it is none."""
    mistakes = [
        f"model.{key}={values[key]}: transformers has it in V4 only, with model.compress_ratios"
        for key in v4.NEEDED
        if values[key]
    ]
    build = next((b for b in _ARCHITECTURES if all(values[k] in v for k, v in _BUILDS[b].items())), "")
    if not build or build == "deepseek_v4":
        keys = "scoring_func", "topk_method", "norm_topk_prob", "index_topk"
        found = ", ".join(f"model.{key}={values[key]}" for key in keys)
        mistakes.append(f"no model of transformers has {found}: it has V2's, V3's and V3.2's combinations only")
    if not model.n_shared_experts:
        mistakes.append("model.n_shared_experts=0: transformers' models have at least 1")
    return build, mistakes
