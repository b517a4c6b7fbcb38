"""Other people's trainers. Each module knows one of them and imports nothing of it until it is used."""
