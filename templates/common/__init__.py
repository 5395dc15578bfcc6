"""Device helpers shared by the kernel templates."""
