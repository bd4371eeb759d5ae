"""Codecs: how compressors encode gradients and decode their sum."""
