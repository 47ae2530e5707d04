"""A verdict on this host."""
