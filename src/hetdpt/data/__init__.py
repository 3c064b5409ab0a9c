"""Images with labels: where they lie, which of them, how they are shown, in which batches. Knows no model."""
