"""Autoencoders on several ranks."""

from xpar.wrappers.vae.parallel_vae import ParallelVae, parallel_vae

__all__ = ["ParallelVae", "parallel_vae"]
