"""The model: what is computed. In what order, and what is kept, is `maxds.schedule`'s.

Everything here runs inside `shard_map`, so all shapes are those of one device.

    B  sequences             D  hidden_size              E  experts, all of them
    S  positions             N  attention heads          G  experts of this device
    T  tokens, B x S         H  head dim of q and k      K  experts per token
    A  tokens of all the     C  kv_lora_rank             R  routed rows that a device makes room for
       devices on the        Q  q_lora_rank              F  width of an MLP or expert
       `expert` axis         V  vocabulary
"""
