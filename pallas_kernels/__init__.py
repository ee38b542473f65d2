"""GPU kernels with an SM budget, each beside its plain-JAX reference."""
