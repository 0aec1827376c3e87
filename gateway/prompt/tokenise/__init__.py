"""From a request body to the tokens the engine will see: chat template and tokenizer, as the engine applies them."""
