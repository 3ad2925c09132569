"""kvstrata inside vLLM: a secondary tier, a connector and a spec. Configuration: docs/VLLM.md.

Importing this package or any module of it starts no thread and opens no file.
"""
