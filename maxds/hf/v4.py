"""V4's keys of config.json <-> those of a model.

The official files and transformers say the same in different keys, both of which are read, and written: a layer is of
a ratio, or of a type that has a rate; layers route by a table as the first so many, or by their types; the rotated part
of a head is a number of dimensions, or a share; and the two rotary tables are in keys beside each other, or in one.
"""

import math
from collections.abc import Sequence
from typing import Any

from maxds.architecture import OVERLAPPED, Model

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
HASHED, ROUTED = "hash_moe", "moe"
# What a model of the build has, and config.json may leave out, the first being what it means then.
CHOICES = {
    "scoring_func": ("sqrtsoftplus", "sigmoid", "softmax"),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "n_group": (1,),
    "topk_group": (1,),
    "n_shared_experts": (1,),
}
NEEDED = "compress_ratios", "num_hash_layers", "hc_mult", "swiglu_limit"  # which other models may leave out


def read(raw: dict[str, Any], mistakes: list[str]) -> dict[str, Any]:
    """config.json, of keys of the right types, with the official ones alone; adds to `mistakes`, and changes `raw`."""
    of_modules = _part_modules(raw, mistakes)
    ratios = raw.get("compress_ratios")
    types, rates = raw.pop("layer_types", None), raw.pop("compress_rates", None)
    if types is None and rates is not None and ratios is not None:
        types = _types(ratios)
    if types is not None:
        _agree(raw, "compress_ratios", _ratios(types, rates or {}, mistakes), "layer_types", mistakes)
    if routers := raw.pop("mlp_layer_types", None):
        hashed = routers.count(HASHED)
        _agree(raw, "num_hash_layers", hashed, "mlp_layer_types", mistakes)
        if routers != [HASHED] * hashed + [ROUTED] * (len(routers) - hashed):
            mistakes.append(f"mlp_layer_types is {routers}; maxds knows {HASHED}, and {ROUTED} after it")
    if OVERLAPPED not in (*(raw.get("compress_ratios") or ()), *of_modules):
        raw.pop("index_topk", None)  # without a layer that has an indexer
    if raw.get("compress_ratios") is not None:
        raw["compress_ratios"] = [*raw["compress_ratios"], *of_modules]
    _read_rope(raw, mistakes)
    return raw


def _part_modules(raw: dict[str, Any], mistakes: list[str]) -> list[int]:
    """Leaves the layers' to `compress_ratios`; returns the MTP modules', of which transformers' keys say nothing."""
    ratios, layers, modules = (raw.get(k) for k in ("compress_ratios", "num_hidden_layers", "num_nextn_predict_layers"))
    layers, modules = layers or 0, modules or 0
    if not 0 <= modules <= layers:
        mistakes.append(f"num_nextn_predict_layers is {modules}; it must be 0 to num_hidden_layers={layers}")
        modules = 0
    raw["num_nextn_predict_layers"] = modules
    if ratios is None or len(ratios) <= layers:
        return [0] * modules
    raw["compress_ratios"] = ratios[:layers]
    return ratios[layers:]


def _types(ratios: Sequence[int]) -> list[str]:
    return [{0: WINDOW, OVERLAPPED: SPARSE}.get(ratio, HEAVY) for ratio in ratios]


def _ratios(types: list[str], rates: dict[str, int], mistakes: list[str]) -> list[int]:
    rates = {WINDOW: 0, SPARSE: OVERLAPPED, HEAVY: 128} | rates
    if rates[SPARSE] != OVERLAPPED or rates[HEAVY] == OVERLAPPED:
        mistakes.append(f"compress_rates is {rates}; maxds knows {OVERLAPPED} of {SPARSE}, and another of {HEAVY}")
    if unknown := set(types) - rates.keys():
        mistakes.append(f"layer_types has {', '.join(sorted(unknown))}; maxds knows {WINDOW}, {SPARSE}, {HEAVY}")
    return [rates.get(kind, 0) for kind in types]


def _agree(raw: dict[str, Any], key: str, value: Any, of: str, mistakes: list[str]) -> None:
    if raw.setdefault(key, value) != value:
        mistakes.append(f"{key} is {raw[key]}, but {of} says {value}; remove the one that is wrong")


def _read_rope(raw: dict[str, Any], mistakes: list[str]) -> None:
    """Makes `rope_scaling`, in the words of either, that of the layers that compress, and parts it from the others."""
    given = raw.pop("rope_parameters", None) or {}
    parts = {key: given.get(key) or {} for key in ("main", "compress")}
    if wrong := [key for key, of_layers in parts.items() if not isinstance(of_layers, dict)]:
        mistakes.append(f"rope_parameters.{wrong[0]} is {given[wrong[0]]}; it must be a dict")
        return
    near, far = (dict(of_layers) for of_layers in parts.values())
    if not far:
        far = {k: v for k, v in (given or raw.get("rope_scaling") or {}).items() if k != "rope_theta"}
    for key, of_layers in (("rope_theta", near), ("compress_rope_theta", far)):
        if "rope_theta" in of_layers:
            _agree(raw, key, of_layers.pop("rope_theta"), "rope_parameters", mistakes)
    shares = [raw.pop("partial_rotary_factor", None), *(of.pop("partial_rotary_factor", None) for of in (near, far))]
    for share in (share for share in shares if share is not None):
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            mistakes.append(f"partial_rotary_factor is {share}; it must be a number from 0 to 1")
            continue
        _agree(raw, "qk_rope_head_dim", int((raw.get("head_dim") or 0) * share), "partial_rotary_factor", mistakes)
    if near.pop("rope_type", "default") != "default" or near:
        mistakes.append(f"rope_parameters.main is {given['main']}; maxds knows rope_type default, and its rope_theta")
    if far.pop("attention_factor", 1) not in (1, None):
        mistakes.append(f"rope_parameters.compress is {given['compress']}; maxds knows attention_factor 1")
    raw["rope_scaling"] = {"mscale": 1.0, "mscale_all_dim": 1.0} | far if far.get("factor") else far


def mistakes(model: Model) -> list[str]:
    """What transformers has not of a model with compress_ratios."""
    found = [
        f"model.{key}={getattr(model, key)}: transformers' V4 has {' or '.join(map(str, choices))}"
        for key, choices in CHOICES.items()
        if getattr(model, key) not in choices
    ]
    found += [
        f"model.{key}=null: transformers' V4 has a number"
        for key in ("hc_mult", "hc_sinkhorn_iters", "swiglu_limit")
        if getattr(model, key) is None
    ]
    if len(heavy := _heavy(model)) > 1:
        found.append(f"model.compress_ratios has {sorted(heavy)}: transformers has one ratio beside 0 and {OVERLAPPED}")
    return found


def write(model: Model) -> dict[str, Any]:
    """What config.json says of a model in transformers' own keys."""
    ratios, hashed = (model.compress_ratios or ())[: model.num_hidden_layers], model.num_hash_layers
    share = model.qk_rope_head_dim / model.head_dim
    if int(model.head_dim * share) < model.qk_rope_head_dim:  # as transformers reckons it
        share = math.nextafter(share, 1)
    return {
        "layer_types": _types(ratios),
        "mlp_layer_types": [HASHED] * hashed + [ROUTED] * (len(ratios) - hashed),
        "compress_rates": {SPARSE: OVERLAPPED, HEAVY: next(iter(_heavy(model)), 128)},
        "partial_rotary_factor": share,
    }


def _heavy(model: Model) -> set[int]:
    return set(model.compress_ratios or ()) - {0, OVERLAPPED}
