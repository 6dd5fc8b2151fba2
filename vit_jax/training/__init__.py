"""How parameters change."""
