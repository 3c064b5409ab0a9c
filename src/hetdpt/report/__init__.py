"""What was found, as files to look at: figures and tables. No torch here, and nothing is computed."""
