"""The values that ddpnb's processes exchange, and the tables that all of them read."""
