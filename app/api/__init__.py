"""HTTP endpoints: each parses a request, asks a service, and shapes the answer."""
