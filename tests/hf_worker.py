"""transformers opens a folder, computes, and saves it: python hf_worker.py HF_DIR TOKENS.npy LOGITS.npy SAVED_DIR."""

import sys

import numpy as np
import torch
import transformers


def main(folder: str, tokens: str, logits: str, saved: str) -> None:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager).eval()
    with torch.no_grad():
        found = model(torch.tensor(np.load(tokens)), use_cache=False).logits
    np.save(logits, found.numpy())
    model.save_pretrained(saved)


if __name__ == "__main__":
    main(*sys.argv[1:])
