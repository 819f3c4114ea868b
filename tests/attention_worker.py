"""transformers' DeepSeek-V4 attention on documents one by one: python attention_worker.py IN.npz OUT.npz.

IN holds `config` (JSON), which `layer`, `weights/NAME` in transformers' names, normalized tokens `y` and what their
outputs are weighed by, `probe`, [B S D], and `segments` [B S]. OUT holds `out` [B S D] and, by name, the gradients.
"""

import json
import sys

import numpy as np
import torch
import transformers
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4


def main(source: str, target: str) -> None:
    given = dict(np.load(source))
    config = transformers.DeepseekV4Config(**json.loads(str(given["config"])), attn_implementation="eager")
    attention, rotary = (
        v4.DeepseekV4Attention(config, int(given["layer"])).float(),
        v4.DeepseekV4RotaryEmbedding(config),
    )
    weights = {k.removeprefix("weights/"): torch.tensor(v) for k, v in given.items() if k.startswith("weights/")}
    attention.load_state_dict(weights)
    y, probe, segments = (torch.tensor(given[k]) for k in ("y", "probe", "segments"))
    out, total = np.zeros(y.shape, np.float32), 0.0
    for row, document in {(r, s) for r, of_row in enumerate(segments.tolist()) for s in of_row if s > 0}:
        own = segments[row] == document
        positions = torch.arange(int(own.sum()))
        distance = positions[:, None] - positions
        hidden = torch.where((distance >= 0) & (distance < config.sliding_window), 0.0, -torch.inf)
        tables = {kind: rotary(y, positions[None], layer_type=kind) for kind in ("main", "compress")}
        found, _ = attention(y[row][own][None], tables, positions[None], hidden[None, None])
        out[row, own.numpy()] = found[0].detach().numpy()
        total += (found[0] * probe[row][own]).sum()
    total.backward()
    grads = {name: p.grad.numpy() for name, p in attention.named_parameters() if p.grad is not None}
    np.savez(target, out=out, **grads)


if __name__ == "__main__":
    main(*sys.argv[1:])
