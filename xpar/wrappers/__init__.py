"""What stands between xpar's core and diffusers: plans, layers and pipelines."""
