"""What people who run the machines ask: does it fit, how is it going, what is left behind, is this host all right."""
