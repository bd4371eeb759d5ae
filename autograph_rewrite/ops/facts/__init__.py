"""Facts: the abstract value of a tensor (placement, symbolic sizes), which rules read and produce."""
