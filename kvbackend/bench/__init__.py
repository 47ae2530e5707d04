"""`kvbackend bench`: what the ops cost here, beside peers and this machine's limits."""
