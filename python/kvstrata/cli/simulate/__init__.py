"""`kvstrata simulate`: what a tier of some size under some policy would have hit on a trace."""
