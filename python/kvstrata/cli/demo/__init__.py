"""`kvstrata demo`: store, restart, reload, on a real vLLM engine and a model made on the spot."""
