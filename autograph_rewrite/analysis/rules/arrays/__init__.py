"""Rules of ops that move, join, cut, look up or order elements."""
