"""Which format where: predictions from an op's declared cost and a machine's rates, before anything is tried."""
