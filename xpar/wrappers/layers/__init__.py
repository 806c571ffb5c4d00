"""Wrappers around attention modules and blocks, and the state of one forward."""
