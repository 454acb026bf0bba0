"""Records the searches that FlashInfer and TileGym make for layers of widely served models."""
