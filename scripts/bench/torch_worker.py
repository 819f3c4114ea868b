"""A worker of `alternate`: train steps of transformers' DeepSeek-V3 on maxds' random tokens, on a CPU or a GPU.

Weights are float32, and operations run in the dtype asked for, as PyTorch's autocast chooses.
"""

import json
import sys

import alternate
import torch
import transformers


def model(c: dict, experts: str, attention: str) -> torch.nn.Module:
    """The official architecture from a config in Hugging Face's names, without MTP (transformers trains none)."""
    config = transformers.DeepseekV3Config(
        **c, num_key_value_heads=c["num_attention_heads"], num_nextn_predict_layers=0, use_cache=False
    )
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, experts_implementation=experts
    ).train()


def main(arguments: str) -> None:
    torch.set_num_threads(int(alternate.THREADS))
    torch.manual_seed(0)
    a = json.loads(arguments)
    device, dtype = "cpu" if a["on_cpu"] else "cuda", getattr(torch, a["dtype"])
    with torch.device(device):
        net = model(a["model"], a["experts"], a["attention"])
    forward = torch.compile(net) if a["compile"] else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.from_numpy(alternate.tokens(a["batch"], a["length"], a["model"]["vocab_size"])).long().to(device)

    def one_step():
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            logits = forward(input_ids=tokens[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    alternate.serve(one_step)


if __name__ == "__main__":
    main(sys.argv[1])
