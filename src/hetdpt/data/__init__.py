"""Images with labels: their sources, subsets, augmentation and batches. Knows no model."""
