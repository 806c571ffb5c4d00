"""The rank grid, its process groups and what is sent over them."""
