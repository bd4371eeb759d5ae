"""A step as tasks on resources (devices, links), and their discrete-event simulation."""
