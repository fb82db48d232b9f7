"""The ledger in PostgreSQL: guards in SQL, rules nowhere."""
