"""What workers and gateways share through Redis: the prefix map and the outstanding load."""
