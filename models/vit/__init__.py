"""ViT: Vision Transformers."""
