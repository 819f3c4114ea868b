"""What a train step will cost on a TPU, from a compiler that needs none: memory, time, communication."""
