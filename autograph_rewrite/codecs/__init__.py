"""Codecs: how compressors encode a gradient, and what the sum of what was sent decodes to."""
