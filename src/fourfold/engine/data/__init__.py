"""Which tokens a step sees, and the counter-based random numbers behind them."""
