"""Pure rules: facts in, decisions out. No I/O, no clock, no randomness, no SQL may live here."""
