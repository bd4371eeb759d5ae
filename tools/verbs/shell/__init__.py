"""The verb for the user's shell."""
