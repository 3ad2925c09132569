"""`kvstrata ls`: what lies at a root, and why two namespaces differ."""
