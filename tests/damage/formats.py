"""The formats that are read, by name."""

FORMATS = ("pb", "pbtxt", "meta", "saved_model_v1", "saved_model_v2", "ar", "text", "plan", "plan_pb", "config")
