"""The stages of a run: what each does, and about how long that takes."""
