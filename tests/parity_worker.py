"""transformers' DeepSeek-V3.2 on documents one by one: python parity_worker.py IN.npz OUT.npz, where transformers is.

IN holds `config` (JSON), `weights/NAME` in transformers' names, and `tokens`, `targets`, `segments` [B S]. OUT holds
`logits` [B S V] and `grads/NAME`, of the mean loss of the tokens that have a target.
"""

import json
import sys

import numpy as np
import torch
import transformers


def main(source: str, target: str) -> None:
    given = dict(np.load(source))
    config = transformers.DeepseekV32Config(**json.loads(str(given["config"])), attn_implementation="eager")
    model = transformers.DeepseekV32ForCausalLM(config).float()
    weights = {k.removeprefix("weights/"): torch.tensor(v) for k, v in given.items() if k.startswith("weights/")}
    model.load_state_dict(weights)
    tokens, targets, segments = (torch.tensor(given[k]).long() for k in ("tokens", "targets", "segments"))
    logits, total = np.zeros((*tokens.shape, config.vocab_size), np.float32), 0.0
    for row, document in {(r, s) for r, of_row in enumerate(segments.tolist()) for s in of_row if s > 0}:
        own = segments[row] == document
        found = model(tokens[row][own][None], use_cache=False).logits[0]
        logits[row, own.numpy()] = found.detach().numpy()
        total += torch.nn.functional.cross_entropy(found, targets[row][own], ignore_index=-1, reduction="sum")
    (total / (targets >= 0).sum()).backward()
    grads = {f"grads/{name}": p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    np.savez(target, logits=logits, **grads)


if __name__ == "__main__":
    main(*sys.argv[1:])
