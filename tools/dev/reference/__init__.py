"""The reference part of docs/, written from the code: strategies, verbs, settings, presets, limits, messages, API."""
