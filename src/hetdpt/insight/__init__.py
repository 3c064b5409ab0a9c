"""What can be seen of a model: the analyses behind the figures. No files, and nothing is chosen."""
