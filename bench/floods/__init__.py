"""What clients that misbehave do to a server: `python -m bench.floods` (bench/floods/__main__.py)."""
