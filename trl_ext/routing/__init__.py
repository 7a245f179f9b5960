"""Which experts the routers of a mixture choose: recorded in one forward, replayed in another."""
