"""What is said between processes: frozen messages and their one encoding. The only door to msgpack."""
