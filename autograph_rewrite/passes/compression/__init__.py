"""Gradient compression: the exchange of encoded gradients, and the state that error feedback keeps."""
