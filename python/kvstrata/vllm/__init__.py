"""kvstrata inside vLLM: a secondary tier, a connector and a spec. See docs/VLLM.md for the configuration.

Importing this package or any module of it starts no thread and opens no file.
"""
