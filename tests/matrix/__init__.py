"""The test matrix: zoo x optimizers x replicas x variable modes x batches, compared with one device."""
