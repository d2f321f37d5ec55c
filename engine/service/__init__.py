"""The engine as a service: core loop, its process, wire frames, client. Knows no HTTP."""
