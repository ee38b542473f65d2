"""Reference files of the tests, as PyTorch and Hugging Face compute them; made by make_*.py."""
