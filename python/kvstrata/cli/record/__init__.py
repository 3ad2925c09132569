"""`kvstrata record`: a trace of what the requests of engines asked for."""
