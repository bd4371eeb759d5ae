"""Scripts for developers: shipped registries of ops and kernels, generated documentation."""
