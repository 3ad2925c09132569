"""The `kvstrata` command line. Importing it loads neither torch nor vLLM."""
