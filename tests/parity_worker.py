"""transformers' models, or V4's attention, on documents one by one: python parity_worker.py FOLDER...

A FOLDER holds a model in Hugging Face's format, and `given.npz`: `segments` [B S], and `tokens` and `targets` [B S] or,
of attention, which `layer`, normalized tokens `y` and what their outputs are weighed by, `probe`, [B S D]. It gets
`out.npy`, logits [B S V] or outputs [B S D], and the gradients as a model is saved, in `gradients`: of the mean loss of
the tokens that have a target and, `mtp` times, of each MTP module's; or of the outputs as weighed.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding


def main(folder: pathlib.Path) -> None:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    causal = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager)
    given = dict(np.load(folder / "given.npz"))
    segments, out, total, modules = given["segments"], None, 0.0, mtp(causal)
    run = attention(causal, given) if "layer" in given else model(causal, modules, given)
    for own in documents(segments):
        found, loss = run(*own)
        out = np.zeros((*segments.shape, found.shape[1]), np.float32) if out is None else out
        out[own] = found.detach().numpy()
        total += loss
    total.backward()
    np.save(folder / "out.npy", out)
    weights = dict(causal.named_parameters()) | of_modules(causal, modules)
    gradients = {name: p.grad for name, p in weights.items() if p.grad is not None}
    causal.save_pretrained(folder / "gradients", state_dict=gradients)


def documents(segments):
    """The row of each, and which of its tokens are of it."""
    found = {(row, s) for row, of_row in enumerate(segments.tolist()) for s in of_row if s > 0}
    return [(row, torch.tensor(segments[row] == s)) for row, s in sorted(found)]


def mtp(causal):
    """The MTP modules of a model, or None."""
    if not getattr(causal.config, "num_nextn_predict_layers", 0):
        return None
    first = causal.config.num_hidden_layers
    causal._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{first}\."]  # it knows those of 61 layers only
    return MtpModel.from_pretrained(causal)


def of_modules(causal, modules):
    """Their weights, by names of layers of the model, which is how files have them."""
    found = {}
    for number, layer in enumerate(modules.layers if modules else (), causal.config.num_hidden_layers):
        for name, p in layer.named_parameters():
            own = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
            found[f"model.layers.{number}.{own}"] = p
    return found


def model(causal, modules, given):
    """Of the tokens [n] of a document, their logits and their part of the loss."""
    tokens, targets = (torch.tensor(given[k]).long() for k in ("tokens", "targets"))
    lengths = torch.tensor([int((targets[own] >= 0).sum()) for own in documents(given["segments"])])

    def run(row, own):
        ahead = targets[row][own]
        ahead = ahead[ahead >= 0]
        hidden = causal.model(tokens[row][own][None], use_cache=False).last_hidden_state
        found = causal.lm_head(hidden)[0]
        loss = cross_entropy(found[: len(ahead)], ahead, reduction="sum") / lengths.sum()
        for depth in range(min(len(modules.layers), len(ahead)) if modules else 0):
            joined = ahead[depth:][None]
            positions = torch.arange(joined.shape[1])[None]
            hidden = modules.forward_layer(depth, hidden[:, : joined.shape[1]], positions, None, input_ids=joined)
            nll = cross_entropy(causal.lm_head(hidden)[0, :-1], joined[0, 1:], reduction="sum")
            loss = loss + given["mtp"].item() * nll / (lengths - depth - 1).clamp(min=0).sum()
        return found, loss

    return run


def attention(causal, given):
    """Of the tokens [n] of a document, the outputs of a layer's attention, and their sum as weighed."""
    layer, rotary = causal.model.layers[int(given["layer"])].self_attn, DeepseekV4RotaryEmbedding(causal.config)
    y, probe = (torch.tensor(given[k]) for k in ("y", "probe"))

    def run(row, own):
        positions = torch.arange(int(own.sum()))
        distance = positions[:, None] - positions
        hidden = torch.where((distance >= 0) & (distance < causal.config.sliding_window), 0.0, -torch.inf)
        tables = {kind: rotary(y, positions[None], layer_type=kind) for kind in ("main", "compress")}
        found = layer(y[row][own][None], tables, positions[None], hidden[None, None])[0][0]
        return found, (found * probe[row][own]).sum()

    return run


if __name__ == "__main__":
    torch.set_num_threads(1)  # for models so small, several wait for each other
    for name in sys.argv[1:]:
        main(pathlib.Path(name))
