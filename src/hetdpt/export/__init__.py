"""Models as files: saved and loaded without pickle, exported to other runtimes, shared through the hub."""
