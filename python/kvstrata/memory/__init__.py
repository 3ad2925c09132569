"""Where KV bytes sit in a CPU slot, and how they get there and back.

The only part of kvstrata, with :mod:`kvstrata.vllm`, that may import torch. It knows nothing of
vLLM.
"""
