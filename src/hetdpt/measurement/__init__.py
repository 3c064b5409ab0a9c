"""Costs and speed of models as numbers that know how they were obtained. Changes no model, prints nothing."""
