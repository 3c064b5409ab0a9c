"""A model changed in place by a plan: gates, removal, merging, calibration."""
