"""The data plane: client side, replica side, and the exchange between them."""
