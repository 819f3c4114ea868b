"""maxds: a trainer for DeepSeek-class mixture-of-experts models on TPU."""

__version__ = "0.1.0"
