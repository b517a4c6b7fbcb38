"""Who starts whom: the launcher owns nothing but its children."""
