"""The second engine: transformers in one process, behind the same wire protocol as vLLM's API server.

For platforms without vLLM, and for tests. It batches continuously, but makes no attempt at vLLM's speed.

    sampling.py      temperature, truncation and the draw, as pure functions
    detokenizer.py   tokens to text, one at a time, with stop strings
    decoder.py       the batch, its KV cache and the weights
    requests.py      what a request may hold
    server.py        the thread that owns the decoder, and the HTTP routes
"""
