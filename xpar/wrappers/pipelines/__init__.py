"""What surrounds the denoiser call: patch loops, replayed encoders, composed latents, random numbers."""
