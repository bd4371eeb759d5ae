"""Gradient compression: 16 bits, top-k, PowerSGD, and the state that error feedback keeps."""
