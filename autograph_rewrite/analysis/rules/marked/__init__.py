"""Rules of ops that a pass has marked as safe to run on each block by itself."""
