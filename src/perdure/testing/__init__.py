"""The test kit: the oracle, strict fakes of the internet, generators and checkers. Nothing shipped imports it."""
