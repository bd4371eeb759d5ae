"""The terminal: output streams, colours, the line of progress, mistyped words, completion."""
