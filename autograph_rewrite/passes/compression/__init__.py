"""Gradient compression: the exchange of what codecs encode, and the state that error feedback keeps."""
