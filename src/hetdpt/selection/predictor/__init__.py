"""How accuracy depends on the removed layers: samples, a polynomial fitted to them, and the budget that follows."""
