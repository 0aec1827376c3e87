"""What a gateway costs: CPU per request and per streamed chunk, ours and the peers', in one run."""
