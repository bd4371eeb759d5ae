"""A step as tasks on devices and links, and their discrete-event simulation."""
