"""Every option of octavo: frozen dataclasses, composed, resolved once. Also the environment and the machine."""
