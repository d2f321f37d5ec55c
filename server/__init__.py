"""The HTTP side: wire schemas, routes, streaming, errors. Knows no tensor, block or sequence."""
