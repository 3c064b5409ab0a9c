"""How accuracy depends on the layers removed: samples of it, a polynomial through them, the budget that follows."""
