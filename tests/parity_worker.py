"""transformers' models, or V4's attention, on documents one by one: python parity_worker.py IN.npz OUT.npz.

IN holds `config` (JSON), `weights/NAME` in transformers' names, and `segments` [B S]; of a model `tokens` and `targets`
[B S]; of attention which `layer`, normalized tokens `y` and what their outputs are weighed by, `probe`, [B S D]. OUT
holds `out`, logits [B S V] or outputs [B S D], and by name the gradients: of the mean loss of the tokens that have a
target, or of the outputs as weighed.
"""

import json
import sys

import numpy as np
import torch
import transformers
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4


def main(source: str, target: str) -> None:
    given = dict(np.load(source))
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = transformers.AutoConfig.for_model(**json.loads(str(given["config"])), **eager)
    module, run = attention(config, given) if "layer" in given else model(config, given)
    weights = {k.removeprefix("weights/"): torch.tensor(v) for k, v in given.items() if k.startswith("weights/")}
    module.float().load_state_dict(weights)
    segments, out, total = given["segments"], None, 0.0
    for row, document in {(r, s) for r, of_row in enumerate(segments.tolist()) for s in of_row if s > 0}:
        own = row, torch.tensor(segments[row] == document)
        found, loss = run(*own)
        out = np.zeros((*segments.shape, found.shape[1]), np.float32) if out is None else out
        out[own] = found.detach().numpy()
        total += loss
    total.backward()
    np.savez(target, out=out, **{k: p.grad.numpy() for k, p in module.named_parameters() if p.grad is not None})


def model(config, given):
    """The model; of the tokens [n] of a document, their logits and their part of the loss."""
    causal = transformers.AutoModelForCausalLM.from_config(config)
    tokens, targets = (torch.tensor(given[k]).long() for k in ("tokens", "targets"))

    def run(row, own):
        found = causal(tokens[row][own][None], use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(found, targets[row][own], ignore_index=-1, reduction="sum")
        return found, loss / (targets >= 0).sum()

    return causal, run


def attention(config, given):
    """The attention of a layer; of the tokens [n] of a document, its outputs, and their sum as weighed."""
    layer, rotary = v4.DeepseekV4Attention(config, int(given["layer"])), v4.DeepseekV4RotaryEmbedding(config)
    y, probe = (torch.tensor(given[k]) for k in ("y", "probe"))

    def run(row, own):
        positions = torch.arange(int(own.sum()))
        distance = positions[:, None] - positions
        hidden = torch.where((distance >= 0) & (distance < config.sliding_window), 0.0, -torch.inf)
        tables = {kind: rotary(y, positions[None], layer_type=kind) for kind in ("main", "compress")}
        found = layer(y[row][own][None], tables, positions[None], hidden[None, None])[0][0]
        return found, (found * probe[row][own]).sum()

    return layer, run


if __name__ == "__main__":
    main(*sys.argv[1:])
