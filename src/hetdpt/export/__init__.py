"""Models as files: saved and loaded without pickle, exported to ONNX, shared through the hub."""
