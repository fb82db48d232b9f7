"""Use cases: how commands become changes, and how steps are performed. No driver, no SQL, no protocol may live here."""
