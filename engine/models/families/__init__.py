"""One file per family of models, found by being here. They must not import torch when they are read:
the front end reads configurations through them."""
