"""What a user asks for (config) and what every worker does (plan): data to read, edit and check."""
