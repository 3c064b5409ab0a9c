"""From a budget to a plan: which layers go. Nothing is trained, saved or printed here."""
