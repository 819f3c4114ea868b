"""Hugging Face's format: which tensor holds which weight, `config.json`, safetensors files."""
