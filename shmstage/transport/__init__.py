"""How messages travel: channels, the request client and server, and the public ``Producer`` and ``Consumer``.

The only door to ZeroMQ.
"""
