"""Tasks with a pruned backbone: transfer, detection, segmentation."""
