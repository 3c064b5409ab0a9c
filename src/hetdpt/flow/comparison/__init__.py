"""A comparison of methods at equal budgets."""
