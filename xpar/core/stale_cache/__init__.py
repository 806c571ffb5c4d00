"""Patches of a token sequence, and the keys and values that outlive them by one step."""
