"""`kvstrata gc`: remove rows from a bucket or a directory."""
